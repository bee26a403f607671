"""Whole runs for tests and `scripts/torture.py`: real processes, started by the command that users type.

Invariants:
* Every process of a run inherits LAMINAR_E2E=<mark>; by it they are found, however deep and in whatever session.
* `Run` is a context: at its end everything that carries the mark is killed. `leftovers` says what a run left behind: living
  processes, and directories in shared memory, which carry the run's name.
* Every wait is bounded and ends early when the controller does.
* At its end a run is replayed: what its controllers decided is what the code decides now (`python -m laminar.replay --verify`).
"""

import http.client
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import psutil

from laminar.replay.recording import Recording
from laminar.replay.show import told
from laminar.replay.verify import verify

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "configs" / "quickstart"
SHM = Path("/dev/shm")
MARK = "LAMINAR_E2E"
START_S = 90.0  # imports of torch and transformers in all workers on a busy machine
END_S = 150.0  # of a run of some dozen short steps, its start included; below the time limits of the tests themselves
VERIFIED_EVENTS_MAX = 100_000  # of a life: a minute at most; runs of tests have some thousand
LOOK_S = 0.02  # conditions outside this process (a process ended, a file appeared) are looked at this often

SMALL = (
    "task.size=400",
    "task.eval_prompts=8",
    "trainer.batch_prompts=4",
    "trainer.lr=1e-4",
    "rollout.group_size=4",
    "rollout.local_batch_groups=2",
    "buffer.max_groups=12",
)
"""Overrides of the quickstart for runs whose steps are short."""


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else 0
    except (OSError, psutil.NoSuchProcess):
        return 0


def hosts_file(directory: Path, *, ranks: int = 1, replicas: int = 1) -> Path:
    """A hosts file for this machine."""
    path = directory / f"hosts-{ranks}-{replicas}.txt"
    path.write_text(f"localhost trainer ranks={ranks}\nlocalhost rollout engine=embedded replicas={replicas}\n")
    return path


def vllm_hosts_file(directory: Path, python: Path, *, replicas: int = 1) -> Path:
    """The same with vLLM servers, which run in an environment of their own."""
    path = directory / f"hosts-vllm-{replicas}.txt"
    path.write_text(f"localhost trainer\nlocalhost rollout engine=vllm replicas={replicas} python={python}\n")
    return path


def new_name() -> str:
    """A run name that no other run has: its shared memory can be told apart."""
    return f"e2e_{uuid.uuid4().hex[:12]}"


class Run:
    """A controller and its workers. `arguments` are those of `python -m laminar.controller`."""

    def __init__(
        self,
        directory: Path,
        name: str,
        arguments: list[str],
        wrap: tuple[str, ...] = (),
        python_path: tuple[str, ...] = (),
    ) -> None:
        self.name, self.path = name, directory / name
        self.lines: list[str] = []
        """What the controller printed so far, stderr included."""
        self.mark = {MARK: uuid.uuid4().hex}
        """Environment of everything that belongs to the run."""
        self.replays = True
        """Its log can be read at its end: no test has damaged it."""
        self._changed = threading.Condition()
        self._ended = False
        environment = {**os.environ, **self.mark, "PYTHONPATH": ":".join([*python_path, str(ROOT)])}
        self.process = subprocess.Popen(
            [*wrap, sys.executable, "-m", "laminar.controller", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="output", daemon=True)
        self._reader.start()

    @classmethod
    def start(
        cls,
        directory: Path,
        hosts: Path,
        *overrides: str,
        config: str = "config.toml",
        options: tuple[str, ...] = (),
        wrap: tuple[str, ...] = (),
        python_path: tuple[str, ...] = (),
    ) -> Self:
        """A new run of one of the quickstart's configurations with overrides. `wrap` is a command that runs a command;
        `python_path` comes before Laminar's own for all processes, so that a `sitecustomize` there can break them."""
        name = new_name()
        files = ["--cluster", str(hosts), "--config", str(QUICKSTART / config)]
        arguments = [*files, *options, f"run.dir={directory}", f"run.name={name}", *overrides]
        return cls(directory, name, arguments, wrap, python_path)

    @classmethod
    def resume(cls, path: Path, *arguments: str, wrap: tuple[str, ...] = ()) -> Self:
        """Go on with a run."""
        return cls(path.parent, path.name, ["--resume", str(path), *arguments], wrap)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    # ---- waiting -------------------------------------------------------------------------------------------

    def until_said(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """The first match in a line of the output. AssertionError when the run ends or the time is over first."""

        def found() -> re.Match[str] | None:
            return next((m for m in map(re.compile(pattern).search, self.lines) if m), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._ended, timeout_s)
            match = found()
        assert match, f"nothing like {pattern!r} within {timeout_s:g} s; output:\n{self.output}"
        return match

    def until(self, condition: Callable[[], Any], timeout_s: float = START_S) -> Any:
        """Wait for what happens outside this process; its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"it did not happen within {timeout_s:g} s; output:\n{self.output}"
            time.sleep(LOOK_S)
        return value

    def wait(self, timeout_s: float = END_S) -> int:
        """The controller's exit code. AssertionError when it goes on for longer."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s; output:\n{self.output}") from None
        if not self.marked():
            self._reader.join(10.0)
        return code

    # ---- asking --------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, token: str | None = None) -> tuple[int, Any]:
        """(status, JSON) of a request to the running controller, with its token or another."""
        url, own = (self.path / "url").read_text(), (self.path / "token").read_text()
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        try:
            connection.request(method, path, headers={"Authorization": f"Bearer {token or own}"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        """`/v1/status`."""
        status, answer = self.ask("GET", "/v1/status")
        assert status == 200, answer
        found: dict[str, Any] = answer
        return found

    # ---- processes -----------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """To the controller only."""
        self.process.send_signal(number)

    def marked(self) -> list[psutil.Process]:
        """All living processes of this run; also those that wiped their environment, by the session they are in."""
        running = list(psutil.process_iter())
        marked = [process for process in running if self._is_marked(process)]
        sessions = {_session(process) for process in marked} - {0, os.getsid(0)}
        return [process for process in running if process in marked or _session(process) in sessions]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark[MARK] and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False

    def worker(self, *words: str) -> psutil.Process | None:
        """The living process whose command line has all these words, deepest first (a rank before its torchrun)."""
        found = [process for process in self.marked() if set(words) <= set(_command(process))]
        return max(found, key=lambda process: process.pid, default=None)

    def kill_worker(self, *words: str) -> int:
        """SIGKILL to that process; its pid."""
        process = self.worker(*words)
        assert process is not None, f"no process {words}; there are {[_command(p) for p in self.marked()]}"
        process.kill()
        return process.pid

    def shm(self) -> list[Path]:
        """What the run has in shared memory."""
        return sorted(SHM.glob(f"laminar-{self.name}-*"))

    def leftovers(self) -> list[str]:
        """Living processes and shared memory."""
        return [f"pid {p.pid}: {' '.join(_command(p))}" for p in self.marked()] + [str(path) for path in self.shm()]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.leftovers() if kind is None else []
        for process in self.marked():
            with _gone_is_fine():
                process.kill()
        self.process.wait(10.0)
        self._reader.join(10.0)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert not left, f"left behind: {left}\n{self.output}"
        if kind is None and self.replays and (self.path / "run.db").exists():
            check_replay(self.path)

    # ---- what the run recorded -----------------------------------------------------------------------------

    def query(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Rows of `run.db`."""
        database = sqlite3.connect(f"file:{self.path / 'run.db'}?mode=ro", uri=True)
        try:
            return database.execute(statement, parameters).fetchall()
        finally:
            database.close()

    def checkpoints(self) -> list[int]:
        """Steps of complete checkpoints."""
        found = (self.path / "checkpoints").glob("step-*")
        return sorted(int(path.name[5:]) for path in found if path.name[5:].isdigit())

    def num_dropped(self) -> dict[str, int]:
        """Trajectories by the reason they were dropped for."""
        return dict(self.query("SELECT dropped, count(*) FROM trajectories WHERE dropped IS NOT NULL GROUP BY dropped"))


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return []


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    try:
        yield
    except psutil.NoSuchProcess:
        return


def check_replay(run: Path) -> None:
    """The present code decides as the run did, in all its lives, to their last events. AssertionError with what differs first."""
    with Recording(run) as recording:
        verdicts = verify(recording, recording.lives, VERIFIED_EVENTS_MAX)
    wrong = [told(verdict, run) for verdict in verdicts if verdict.divergence or verdict.unusable or verdict.cut]
    assert not wrong, "\n".join(wrong)


def ledger_is_closed(output: str) -> bool:
    """Whether the last screen says so of trajectories and of tokens."""
    return len(re.findall(r"^ledger, .*\[closed\]$", output, re.MULTILINE)) == 2
