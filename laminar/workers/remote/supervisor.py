"""The supervisor of one process of a run on this host. It outlives the ssh connections to it.

Invariants:
* When the supervisor ends, nothing of the process is left, descendants in other sessions included.
* Before it starts the process, nothing of an earlier one of the same name is left, nor its supervisor.
* It obeys one connection, the last one, never one of a controller with a lower boot number than it has seen.
* A connection that breaks does not hurt the process. Without a word for `Order.survive_s`, over a connection or by the process's
  own channel, it is ended.
* The status and the last output are kept for the controller as long, but for a status of 0: the process was told to end.
* Output that nobody takes does not hold up the process: of more than `BUFFER_BYTES_MAX` the oldest are left out, and that is said.

Everything happens in one thread, in `Supervisor.run`.
"""

import contextlib
import fcntl
import hashlib
import os
import selectors
import signal
import socket
import subprocess
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from laminar import processes, wire
from laminar.errors import StartError
from laminar.remote import KILL, NOT_STARTED, OUTDATED, STARTED, TERMINATE, Attach, Leave, Order, status_of
from laminar.workers.relay import paths
from laminar.workers.relay.protocol import SOCKET_NAME

STREAMS = (0, 1, 2)
REFUSED = b"no"  # said to another supervisor of the name, of a controller that is outdated
TERMINATED_S = 5.0  # from SIGTERM to SIGKILL when nobody is there to say it
KILLED_S = 10.0  # for killed processes to be gone: they may have gigabytes to free
FLUSH_S = 5.0  # for the last output; who does not read for so long does not read it
GREETING_S = 5.0  # of a process here that connects to us
LOOK_S = 1.0  # at processes that do not end though killed
CHUNK_BYTES = 65_536
BUFFER_BYTES_MAX = 4 << 20  # minutes of a talkative worker
WORDS_BYTES = 4096
GREETING_BYTES_MAX = 65_536


def socket_of(marks: Mapping[str, str]) -> Path:
    """Where the supervisor of a process listens, by its run's token and its name; neither is told by the path."""
    digest = hashlib.sha256(f"{marks[processes.TOKEN]}\0{marks[processes.NAME]}".encode()).hexdigest()
    return paths.shm_directory(digest[:24]) / SOCKET_NAME


def supervise(order: Order, connection: "Connection") -> None:
    """In a fork: from now on it belongs to no session of ssh."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in STREAMS:
        os.dup2(nothing, stream)
    try:
        supervisor = Supervisor(order, connection)
    except (OSError, StartError) as error:
        named = f"{error.strerror}: {error.filename or order.command[0]}" if isinstance(error, OSError) else str(error)
        connection.say(f"{named}\n".encode())
        connection.tell(NOT_STARTED)
        connection.end()
        return
    supervisor.run()


class Connection:
    """The streams of an ssh connection, and a socket to the process that passes on the status."""

    def __init__(self, control: socket.socket, streams: Sequence[int]) -> None:
        self.control = control
        self.orders, self.output, self.words = streams
        self.is_heard = True
        """Nobody has hung up at its other end."""
        self._is_told = self._was_heard = False
        flags = fcntl.fcntl(self.output, fcntl.F_GETFL)
        fcntl.fcntl(self.output, fcntl.F_SETFL, flags | os.O_NONBLOCK)

    def say(self, words: bytes) -> None:
        """On stderr."""
        with contextlib.suppress(OSError):
            os.write(self.words, words)

    def tell(self, status: int) -> None:
        """The status to pass on; the first one counts. Who has read it says so: one that is killed meanwhile has not."""
        if not self._is_told:
            self._is_told, self._was_heard = True, self.is_heard
            with contextlib.suppress(OSError):
                self.control.send(bytes([status]))

    def has_taken(self) -> bool:
        """What the process at its end said last, or by its end: whether it passes the status on, to somebody who heard us."""
        try:
            return bool(self.control.recv(1)) and self._was_heard
        except OSError:
            return False

    def end(self) -> None:
        """Hang up."""
        self.control.close()
        for stream in (self.orders, self.output, self.words):
            os.close(stream)


class Output:
    """What the process has written and nobody has taken yet."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._num_bytes = self._num_lost = 0

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def put(self, data: bytes) -> None:
        """Keep it; the oldest make room."""
        self._chunks.append(data)
        self._num_bytes += len(data)
        while self._num_bytes > BUFFER_BYTES_MAX:
            lost = len(self._chunks.popleft())
            self._num_bytes -= lost
            self._num_lost += lost

    def write(self, descriptor: int) -> None:
        """As much as it takes at once. OSError if it takes none any more."""
        if self._num_lost:
            note = f"\n[{self._num_lost} bytes left out: the connection did not take them]\n".encode()
            self._chunks.appendleft(note)
            self._num_bytes += len(note)
            self._num_lost = 0
        with contextlib.suppress(BlockingIOError):
            while self._chunks:
                num = os.write(descriptor, self._chunks[0])
                self._num_bytes -= num
                rest = self._chunks.popleft()[num:]
                if rest:
                    self._chunks.appendleft(rest)


class Supervisor:
    """Starts the process at once. Raises OSError or StartError if that is impossible."""

    def __init__(self, order: Order, connection: Connection) -> None:
        self._survive_s, self._boot = order.survive_s, order.boot
        self._marks = {processes.SUPERVISED: uuid.uuid4().hex}
        self._output, self._status = Output(), -1
        self._selector = selectors.PollSelector()
        self._connection: Connection | None = None
        self._is_leaving = self._is_taken = False
        self._flush_by = self._terminated_at = 0.0
        earlier = {key: order.environment[key] for key in (processes.TOKEN, processes.NAME)}
        send_away(earlier, order.boot)
        processes.end(lambda: processes.marked(earlier), KILLED_S)
        self._listen(socket_of(earlier))
        self._tell_url(order.url)
        self._child = self._start(order)
        self._connect(connection)

    def _listen(self, path: Path) -> None:
        self._directory = paths.create(path.parent.name.removeprefix(paths.PREFIX), "")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._watch(self._listener, self._greet)

    def _start(self, order: Order) -> subprocess.Popen[bytes]:
        own = {**self._marks, wire.HOST_RENDEZVOUS_VARIABLE: str(self._url)}
        try:
            child = subprocess.Popen(
                order.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **order.environment, **own},
                start_new_session=True,
            )
        except OSError:
            paths.remove(self._directory)
            raise
        assert child.stdout is not None
        self._source = child.stdout.fileno()
        self._watch(self._source, self._collect)
        self._ending = os.pidfd_open(child.pid)
        self._watch(self._ending, self._on_ended)
        return child

    # ---- the loop ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the process has ended, all that it left behind too, and the controller knows."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        while not self._is_over():
            for key, _ in self._selector.select(self._until_next_look_s()):
                if self._selector.get_map().get(key.fd) is key:  # what came before it may have ended the connection
                    key.data()
            self._look_at_clock()
        self._disconnect()
        paths.remove(self._directory)

    def _on_sigterm(self, *_: object) -> None:
        self._is_leaving = True
        self._terminate()

    def _watch(self, source: int | socket.socket, act: Callable[[], object], event: int = selectors.EVENT_READ) -> None:
        self._selector.register(source, event, act)

    def _forget(self, source: int | socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def _until_next_look_s(self) -> float:
        moment = self._flush_by if self._connection and self._has_ended else self._silent_at
        return max(0.0, moment - time.monotonic()) if moment > time.monotonic() else LOOK_S

    def _look_at_clock(self) -> None:
        """Without a controller for too long the process is ended."""
        now = time.monotonic()
        if self._has_ended or now < self._silent_at:
            self._terminated_at = 0.0
        elif not self._terminated_at:
            self._terminated_at = now
            self._terminate()
        elif now >= self._terminated_at + TERMINATED_S:
            processes.kill(self._all)

    @property
    def _silent_at(self) -> float:
        """When the process has been without a controller for too long."""
        return max(self._heard_at, self._last_touch()) + self._survive_s

    def _last_touch(self) -> float:
        """When the process heard its controller by its own channel."""
        try:
            ago_s = time.time() - self._url.stat().st_mtime
        except OSError:
            return 0.0
        return time.monotonic() - max(0.0, ago_s)

    @property
    def _has_ended(self) -> bool:
        return self._status >= 0

    def _is_over(self) -> bool:
        if not self._has_ended:
            return False
        now = time.monotonic()
        if self._connection is not None:
            if (self._source >= 0 or self._output) and now < self._flush_by:
                return False
            self._connection.tell(self._status)
        return self._is_taken or self._is_leaving or self._status == 0 or now >= self._silent_at

    # ---- the process ---------------------------------------------------------------------------------------

    def _all(self) -> list[psutil.Process]:
        return processes.marked(self._marks, [self._child.pid])

    def _terminate(self) -> None:
        processes.send(self._all(), signal.SIGTERM)

    def _on_ended(self) -> None:
        status = status_of(self._child.wait())
        self._forget(self._ending)
        os.close(self._ending)
        processes.end(self._all, KILLED_S)
        paths.sweep()  # a relay that was killed leaves its slots
        self._status = status
        self._flush_by = time.monotonic() + FLUSH_S

    def _collect(self) -> None:
        data = os.read(self._source, CHUNK_BYTES)
        if data:
            self._output.put(data)
            self._offer()
        else:
            self._forget(self._source)
            self._source = -1

    # ---- connections ---------------------------------------------------------------------------------------

    def _tell_url(self, url: str) -> None:
        """Where the process finds its controller, on a host that need not see the run's directory."""
        self._url = self._directory / "url"
        fresh = self._directory / "url.new"
        fresh.write_text(url)
        os.replace(fresh, self._url)

    def _greet(self) -> None:
        control, _ = self._listener.accept()
        control.settimeout(GREETING_S)
        streams: Sequence[int] = []
        try:
            data, streams, _, _ = socket.recv_fds(control, GREETING_BYTES_MAX, len(STREAMS))
            order: Attach | Leave = msgspec.json.decode(data, type=Attach | Leave)
            if isinstance(order, Leave):
                self._leave(order, control)
                return
            connection = Connection(control, streams)
        except (OSError, ValueError, msgspec.MsgspecError):
            control.close()
            for stream in streams:
                os.close(stream)
            return
        self._attach(order, connection)

    def _attach(self, order: Attach, connection: Connection) -> None:
        if order.boot < self._boot:
            connection.say(f"{order.name} belongs to another controller, of boot {self._boot}\n".encode())
            connection.tell(OUTDATED)
            connection.end()
            return
        self._boot = order.boot
        try:
            self._tell_url(order.url)
        except OSError as error:
            connection.say(f"cannot write {self._url}: {error.strerror}\n".encode())
        self._disconnect()
        self._connect(connection)

    def _leave(self, order: Leave, asked_by: socket.socket) -> None:
        """`asked_by` is closed by our end."""
        if order.boot < self._boot:
            asked_by.send(REFUSED)
            asked_by.close()
            return
        self._asked_by, self._is_leaving = asked_by, True
        processes.kill(self._all)

    def _connect(self, connection: Connection) -> None:
        self._connection, self._heard_at = connection, time.monotonic()
        os.dup2(connection.words, STREAMS[2])  # for what we never meant to say
        connection.say(STARTED)
        self._line = b""
        self._watch(connection.control, self._on_hung_up)
        self._watch(connection.orders, self._obey)
        self._offer()

    def _on_hung_up(self) -> None:
        """The process that passes on the status has taken it, or has ended."""
        assert self._connection is not None
        self._is_taken = self._connection.has_taken()
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        for source in (connection.control, connection.orders, connection.output):
            self._forget(source)
        os.dup2(STREAMS[0], STREAMS[2])
        connection.end()

    def _obey(self) -> None:
        """The words of the controller. If its stdin ends it is gone, but what it started may still take output."""
        connection = self._connection
        assert connection is not None
        self._heard_at = time.monotonic()
        data = os.read(connection.orders, WORDS_BYTES)
        if not data:
            connection.is_heard = False
            self._forget(connection.orders)
        *words, self._line = (self._line + data).split(b"\n")
        for word in words:
            if word == TERMINATE.strip():
                self._terminate()
            elif word == KILL.strip():
                processes.kill(self._all)

    def _offer(self) -> None:
        """Output to the connection as far as it takes it; what it does not take, when it does."""
        connection = self._connection
        if connection is None:
            return
        try:
            self._output.write(connection.output)
        except OSError:  # it broke
            self._disconnect()
            return
        self._forget(connection.output)
        if self._output:
            self._watch(connection.output, self._offer, selectors.EVENT_WRITE)


def send_away(marks: Mapping[str, str], boot: int) -> None:
    """Have the supervisor of a process end, with the process. Raises StartError if it obeys a controller of a later boot."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        answer = b""
        with contextlib.suppress(OSError):
            asking.connect(str(socket_of(marks)))
            asking.settimeout(KILLED_S + FLUSH_S)
            asking.send(msgspec.json.encode(Leave(boot=boot)))
            answer = asking.recv(len(REFUSED))
    if answer == REFUSED:
        raise StartError(f"{marks[processes.NAME]} belongs to another controller, of a boot after {boot}")
