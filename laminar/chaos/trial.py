"""A real run that faults are injected into: started or attached to, resumed when its controller was killed, stopped at the end."""

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import psutil

from laminar.controller.rundir import RunDirectory
from laminar.core import events
from laminar.errors import StartError

STOP_S = 120.0  # for the last step and the checkpoint
RESUMED_S = 60.0  # for a controller to be there again; workers wait for `controller.orphan_timeout_s` only
LOOK_S = 0.05


class Tail:
    """The events of a run's log, as they reach the disk."""

    def __init__(self, database: Path, *, from_now: bool = False) -> None:
        self._database, self._last = database, (0, 0)
        if from_now:
            self.new()

    def new(self) -> list[events.AnyEvent]:
        """Since the last call. None while the database is not there or busy."""
        boot, seq = self._last
        statement = "SELECT boot, seq, body FROM events WHERE boot > ? OR (boot = ? AND seq > ?) ORDER BY boot, seq"
        try:
            with closing(sqlite3.connect(f"{self._database.as_uri()}?mode=ro", uri=True)) as database:
                rows = database.execute(statement, (boot, boot, seq)).fetchall()
        except sqlite3.Error:
            return []
        if rows:
            self._last = rows[-1][:2]
        return [msgspec.msgpack.decode(body, type=events.AnyEvent) for _, _, body in rows]


class Trial:
    """`say(line)` takes what the controller prints. Not started: `start`, or `attach`."""

    def __init__(self, run: RunDirectory, say: Callable[[str], None]) -> None:
        self.run, self._say = run, say
        self.lines: list[str] = []
        """All that its controllers have printed."""
        self.is_own = True
        """This process started it."""
        self._process: subprocess.Popen[str] | None = None
        self._attached: psutil.Process | None = None
        self._readers: list[threading.Thread] = []

    @property
    def pid(self) -> int:
        """Of the present controller."""
        found = self._process or self._attached
        assert found is not None
        return found.pid

    @property
    def is_over(self) -> bool:
        """The controller has ended."""
        if self._process is not None:
            return self._process.poll() is not None
        return self._attached is None or not self._attached.is_running()

    @property
    def last_words(self) -> str:
        """Why it ended, as far as it says so."""
        said = [line for line in self.lines if "the run failed" in line or line.startswith("error:")]
        return (said or self.lines or ["the run said nothing"])[-1]

    def start(self, arguments: list[str]) -> None:
        """`python -m laminar.controller` with these arguments. It is not in our process group: Ctrl-C is for us."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "laminar.controller", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read, args=(self._process,), name="output", daemon=True)
        reader.start()
        self._readers.append(reader)

    def attach(self) -> None:
        """To a run that somebody else has started. Raises StartError if none runs."""
        try:
            with closing(sqlite3.connect(f"{self.run.database.as_uri()}?mode=ro", uri=True)) as database:
                pid, outcome = database.execute("SELECT pid, outcome FROM boots ORDER BY boot DESC LIMIT 1").fetchone()
            self._attached = psutil.Process(pid)
            lives = outcome is None and "laminar.controller" in self._attached.cmdline()
        except (sqlite3.Error, TypeError, psutil.Error):
            lives = False
        if not lives:
            raise StartError(f"no controller of {self.run.path} runs on this machine; start one, or give --cluster")
        self.is_own = False

    def resume(self) -> None:
        """Another controller in the place of one that was killed."""
        told = len(self.lines)
        self.start(["--resume", str(self.run.path)])
        deadline = time.monotonic() + RESUMED_S
        while not any(line.startswith("goes on after a controller") for line in self.lines[told:]):
            if self.is_over or time.monotonic() > deadline:
                return  # whatever it said is in its lines; the injector sees that it is over
            time.sleep(LOOK_S)

    def kill_controller(self) -> None:
        """SIGKILL; its workers live on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_S)

    def stop(self) -> int | None:
        """Ctrl-C, and once more if that takes too long. The exit code; None of a run that is not ours."""
        if self._process is None:
            return None
        for _ in range(2):
            if self.is_over:
                break
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):  # the second Ctrl-C is for it, too
                continue
        if not self.is_over:
            self._process.kill()
        code = self._process.wait(STOP_S)
        for reader in self._readers:
            reader.join(LOOK_S * 20)  # workers that are left over hold the pipe open; that is told elsewhere
        return code

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._say(line.rstrip("\n"))
