"""`python -m laminar.controller` with probes in its event loop: `probed_controller.py CORE OUT ARGUMENTS…`.

It runs on one core, with all its threads. On SIGUSR1 what the probes saw is written to OUT (JSON), in seconds since the epoch:

* `lags`: [when, how late the loop was] every 5 ms or as often as the loop lets it;
* `commits`: [when, seq up to which all events are on disk];
* `collections`: [when, how long, generation] of the garbage collector's.
"""

import asyncio
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from laminar.controller import __main__ as command
from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime

INTERVAL_S = 0.005


class Probe:
    """Listens in on the parts of the controller of this process."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._lags: list[tuple[float, float]] = []
        self._commits: list[tuple[float, int]] = []
        self._collections: list[tuple[float, float, int]] = []
        self._collecting_since = 0.0

    def install(self) -> None:
        """To be called before the controller is made."""
        start_runtime, start_log = Runtime.start, EventLog.start

        def start(runtime: Runtime) -> None:
            start_runtime(runtime)
            runtime.own(self._measure(runtime), "probe")
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._write)

        def start_with_ear(log: EventLog, on_durable: Any) -> None:
            def durable(seq: int) -> None:
                self._commits.append((time.time(), seq))
                on_durable(seq)

            start_log(log, durable)

        Runtime.start, EventLog.start = start, start_with_ear  # type: ignore[method-assign]
        gc.callbacks.append(self._on_collection)

    async def _measure(self, runtime: Runtime) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(INTERVAL_S)
            self._lags.append((runtime.now(), max(0.0, time.monotonic() - before - INTERVAL_S)))

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = time.perf_counter()
        else:
            lasted = time.perf_counter() - self._collecting_since
            self._collections.append((time.time(), lasted, info["generation"]))

    def _write(self) -> None:
        seen = {"lags": self._lags, "commits": self._commits, "collections": self._collections}
        new = self._out.with_suffix(".new")
        new.write_text(json.dumps(seen))
        os.replace(new, self._out)


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})
    Probe(Path(sys.argv[2])).install()
    sys.exit(command.main(sys.argv[3:]))
