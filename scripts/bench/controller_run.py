"""A real controller in a process of its own, whose workers are simulated elsewhere (`bench.fleet`).

The processes that it launches sleep: they only stand in the hosts file. Its decisions, log, token segments, server and timers are
those of any run.
"""

import contextlib
import json
import signal
import stat
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from scripts.bench.fleet import PROMPT_TOKENS, Load

SCRIPT = Path(__file__).resolve().parent / "probed_controller.py"
START_S = 60.0
BATCH_GROUPS = 512
GROUP_SIZE = 8


class ControllerRun:
    """Context: the controller runs inside, pinned to `core`, and nothing is left of it afterwards."""

    def __init__(self, directory: Path, load: Load, core: int, overrides: tuple[str, ...] = ()) -> None:
        self.path = directory / "run"
        self._directory, self._core = directory, core
        self._probe = directory / "probe.json"
        self._output = directory / "controller.out"
        self._launched: list[psutil.Process] = []
        self._arguments = [f"--cluster={directory / 'hosts.txt'}", *_overrides(directory, load), *overrides]

    def __enter__(self) -> Self:
        _write_inputs(self._directory)
        self.start(self._arguments)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self, arguments: list[str]) -> None:
        """Start the controller with these arguments. RuntimeError if it does not listen in time."""
        before = self._written_at()
        command = [sys.executable, str(SCRIPT), str(self._core), str(self._probe), *arguments]
        with self._output.open("ab") as output:
            self.process = psutil.Popen(command, stdout=output, stderr=output, start_new_session=True)
        deadline = time.monotonic() + START_S
        while self._written_at() == before:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the controller does not listen:\n{self.output()}")
            time.sleep(0.02)

    def _written_at(self) -> int:
        """Of the file that says where the controller listens, ns; 0 = there is none."""
        url = self.path / "url"
        return url.stat().st_mtime_ns if url.exists() else 0

    def resume(self) -> None:
        """Another controller takes the place of one that was killed."""
        self.start(["--resume", str(self.path)])

    @property
    def url(self) -> str:
        return (self.path / "url").read_text().strip()

    @property
    def token(self) -> str:
        return (self.path / "token").read_text()

    def output(self) -> str:
        """Its last lines."""
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-20:])

    def cpu_s(self) -> float:
        """Processor time of all its threads so far, seconds."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def written_bytes(self) -> int:
        """Bytes that it gave to disks so far."""
        return int(self.process.io_counters().write_bytes)

    def probes(self) -> dict[str, list[Any]]:
        """What its probes saw so far."""
        self._probe.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + START_S
        while not self._probe.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the controller does not answer:\n{self.output()}")
            time.sleep(0.02)
        seen: dict[str, list[Any]] = json.loads(self._probe.read_text())
        return seen

    def crash(self) -> None:
        """SIGKILL; what it launched lives on."""
        self._launched += self.process.children()
        self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        """The controller and what it launched."""
        if self.process.is_running():
            self.crash()
        for process in self._launched:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _write_inputs(directory: Path) -> None:
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text("{}")
    text = "x" * (4 * PROMPT_TOKENS)  # about four characters a token
    rows = (json.dumps({"prompt": f"{number}: {text}", "answer": "y"}) for number in range(4096))
    (directory / "data.jsonl").write_text("\n".join(rows))
    sleeps = directory / "sleeps"
    sleeps.write_text("#!/bin/sh\nexec sleep 3600\n")
    sleeps.chmod(sleeps.stat().st_mode | stat.S_IXUSR)
    (directory / "hosts.txt").write_text(f"localhost trainer python={sleeps}\nlocalhost rollout python={sleeps}\n")


def _overrides(directory: Path, load: Load) -> list[str]:
    in_flight = load.replicas * load.trajectories // GROUP_SIZE
    return [
        f"run.dir={directory}",
        "run.name=run",
        "run.steps=1000000",
        f"model.path={directory / 'model'}",
        f"task.dataset={directory / 'data.jsonl'}",
        f"rollout.group_size={GROUP_SIZE}",
        f"rollout.max_tokens={4 * load.mean_tokens}",
        f"rollout.max_concurrent={load.trajectories}",
        "rollout.local_batch_groups=1000000",  # replicas admit for ever: the rate stays constant
        f"trainer.batch_prompts={BATCH_GROUPS}",
        "trainer.checkpoint_every=1",
        f"buffer.max_groups={in_flight + 4 * BATCH_GROUPS}",
        "repack.enabled=false",
        "controller.heartbeat_timeout_s=60",  # the machine that measures may be busy
        "controller.console=plain",
    ]
