"""`python -m laminar.workers.remote.supervise`: one process of a run on this host, for a controller at the other end of an ssh.

What goes over stdin, stdout, stderr and the exit status: `laminar.remote`.

Invariants:
* When the supervisor ends, nothing of the process is left, descendants in other sessions included.
* Before it starts the process, nothing of an earlier one of the same name is left, whose connection or supervisor died.
* A connection that breaks does not hurt the process: it may go on for `Order.survive_s`, then it is ended.
* A connection that takes no output does not hold up the process: what does not fit into `CHUNKS_MAX` is left out, and that is said.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import uuid

import msgspec
import psutil

from laminar import processes
from laminar.remote import KILL, NOT_STARTED, STARTED, TERMINATE, Order, status_of
from laminar.workers.relay import paths

LAUNCH = "LAMINAR_LAUNCH"  # tells a process from a later one of the same name
TERMINATED_S = 5.0  # from SIGTERM to SIGKILL when nobody is there to say it
KILLED_S = 10.0  # for killed processes to be gone: they may have gigabytes to free
FLUSH_S = 5.0  # for the last output; who does not read for so long does not read it
CHUNK_BYTES = 65_536
CHUNKS_MAX = 64  # 4 MiB: minutes of a talkative worker


def main() -> int:
    """The exit status that stands for the process's end."""
    line = sys.stdin.buffer.readline()
    if not line:  # the client has ended already
        return NOT_STARTED
    order = msgspec.json.decode(line, type=Order)
    try:
        supervisor = Supervisor(order)
    except OSError as error:
        print(f"{error.strerror}: {error.filename or order.command[0]}", file=sys.stderr)
        return NOT_STARTED
    sys.stderr.buffer.write(STARTED)
    sys.stderr.flush()
    return supervisor.run()


class Supervisor:
    """Starts the process at once. Raises OSError if that is impossible."""

    def __init__(self, order: Order) -> None:
        self._survive_s = order.survive_s
        self._marks = {LAUNCH: uuid.uuid4().hex}
        self._ended = threading.Event()
        earlier = {key: order.environment[key] for key in (processes.TOKEN, processes.NAME)}
        processes.end(lambda: processes.marked(earlier), KILLED_S)
        self._child = subprocess.Popen(
            order.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **order.environment, **self._marks},
            start_new_session=True,
        )
        assert self._child.stdout is not None
        self._output = Output(self._child.stdout.fileno(), sys.stdout.fileno())

    def run(self) -> int:
        """Until the process has ended, and all that it left behind."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._terminate())
        threading.Thread(target=self._obey, name="orders", daemon=True).start()
        status = status_of(self._child.wait())
        self._ended.set()
        processes.end(self._all, KILLED_S)
        paths.sweep()  # a relay that was killed leaves its slots
        self._output.finish()
        return status

    def _all(self) -> list[psutil.Process]:
        return processes.marked(self._marks, [self._child.pid])

    def _terminate(self) -> None:
        processes.send(self._all(), signal.SIGTERM)

    def _obey(self) -> None:
        """The words of the controller; after them the time that a process has without one."""
        for word in sys.stdin.buffer:
            if word == TERMINATE:
                self._terminate()
            elif word == KILL:
                processes.kill(self._all)
        if not self._ended.wait(self._survive_s):
            self._terminate()
        if not self._ended.wait(TERMINATED_S):
            processes.kill(self._all)


class Output:
    """Carries bytes from one file descriptor to another, and loses some rather than wait."""

    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = source, target
        self._chunks: queue.Queue[bytes] = queue.Queue(CHUNKS_MAX)
        self._threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True) for work in (self._collect, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until all is written, but not for ever."""
        for thread in self._threads:
            thread.join(FLUSH_S)

    def _collect(self) -> None:
        num_lost = 0
        while data := os.read(self._source, CHUNK_BYTES):
            note = f"\n[{num_lost} bytes left out: the connection did not take them]\n".encode() if num_lost else b""
            try:
                self._chunks.put_nowait(note + data)
                num_lost = 0
            except queue.Full:
                num_lost += len(data)
        with contextlib.suppress(queue.Full):
            self._chunks.put(b"", timeout=FLUSH_S)

    def _write(self) -> None:
        is_open = True
        while data := self._chunks.get():
            while is_open and data:
                try:
                    data = data[os.write(self._target, data) :]
                except OSError:  # the connection broke
                    is_open = False


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: the thread that reads orders holds the lock of stdin
