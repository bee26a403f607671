"""A real run that faults are injected into: started or attached to, resumed when its controller was killed, stopped at the end."""

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psutil

from laminar import __version__, processes
from laminar.controller import recovery
from laminar.controller.rundir import RunDirectory
from laminar.core import events
from laminar.errors import StartError

STOP_S = 120.0  # for the last step and the checkpoint
RESUMED_S = 60.0  # for a controller to be there again; workers wait for `controller.orphan_timeout_s` only
LOOK_S = 0.05
LINES_MAX = 1000  # of what the controllers print: the last ones say why a run ended
LAST = "SELECT boot, seq FROM events ORDER BY boot DESC, seq DESC LIMIT 1"
SINCE = "SELECT boot, seq, body FROM events WHERE (boot, seq) > (?, ?) ORDER BY boot, seq LIMIT 10000"


class Tail:
    """The events of a run's log, as they reach the disk."""

    def __init__(self, database: Path, *, from_now: bool = False) -> None:
        self._database, self._last = database, (0, 0)
        if from_now:
            self._last = next(iter(self._rows(LAST)), (0, 0))

    def new(self) -> list[events.AnyEvent]:
        """Some of those since the last call, in order; none while the database is not there or busy."""
        rows = self._rows(SINCE, *self._last)
        if rows:
            self._last = rows[-1][:2]
        return [msgspec.msgpack.decode(body, type=events.AnyEvent) for _, _, body in rows]

    def _rows(self, statement: str, *parameters: int) -> list[tuple[Any, ...]]:
        try:
            with closing(sqlite3.connect(f"{self._database.as_uri()}?mode=ro", uri=True)) as database:
                return database.execute(statement, parameters).fetchall()
        except sqlite3.Error:
            return []


class Trial:
    """`say(line)` takes what the controller prints. Not started: `start`, or `attach`."""

    def __init__(self, run: RunDirectory, say: Callable[[str], None]) -> None:
        self.run, self._say = run, say
        self.lines: deque[str] = deque(maxlen=LINES_MAX)
        """The last that its controllers have printed."""
        self.is_own = True
        """This process started it."""
        self._process: subprocess.Popen[str] | None = None
        self._attached: psutil.Process | None = None
        self._readers: list[threading.Thread] = []
        self._goes_on = threading.Event()
        """A controller has said that it goes on after another."""

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
        return self._attached is None or not processes.living([self._attached])

    @property
    def last_words(self) -> str:
        """Why it ended, as far as it says so."""
        lines = list(self.lines)
        said = [line for line in lines if "the run failed" in line or line.startswith("error:")]
        return (said or lines or ["the run said nothing"])[-1]

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
                last = "SELECT pid, outcome, code FROM boots ORDER BY boot DESC LIMIT 1"
                pid, outcome, code = database.execute(last).fetchone()
            self._attached = psutil.Process(pid)
            lives = outcome is None and "laminar.controller" in self._attached.cmdline()
        except (sqlite3.Error, TypeError, psutil.Error):
            lives = False
        if not lives:
            raise StartError(f"no controller of {self.run.path} runs on this machine; start one, or give --cluster")
        if code != __version__:
            raise StartError(
                f"{self.run.path} is run by Laminar {code}, this is {__version__}: use that one's laminar.chaos"
            )
        self.is_own = False

    def resume(self) -> None:
        """Another controller in the place of one that was killed."""
        self._goes_on.clear()
        self.start(["--resume", str(self.run.path)])
        deadline = time.monotonic() + RESUMED_S
        while not self._goes_on.wait(LOOK_S):
            if self.is_over or time.monotonic() > deadline:
                return  # whatever it said is in its lines; the injector sees that it is over

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
            if line.startswith(recovery.GOES_ON):
                self._goes_on.set()
