"""The bookkeeping of one reliable, ordered channel, without any I/O: both ends use it.

Invariants:
* Reliable frames are numbered 1, 2, 3 … per direction; number 0 is never resent (heartbeats, Hello, Welcome, Refused).
* A frame is kept until the other side has acknowledged it, and sent again after a reconnect.
* `accept` takes each number exactly once and in order: duplicates are dropped, a gap is a protocol error.

The worker acknowledges what it has received; the controller only what is durable in its log.
"""

from collections import deque

from laminar import wire
from laminar.errors import ProtocolError

PENDING_BYTES_MAX = 1 << 30  # an hour of one replica's tokens; beyond it the sender has to stop producing


class Session:
    """One direction pair of a channel. `envelope` is wire.WorkerEnvelope or wire.ControllerEnvelope: what this end sends."""

    def __init__(self, envelope: type[wire.WorkerEnvelope] | type[wire.ControllerEnvelope]) -> None:
        self.received = 0
        """Highest number accepted from the other side."""
        self.acknowledge = 0
        """Highest number that this end vouches for; travels in every frame."""
        self._envelope = envelope
        self._sent = 0
        self._pending: deque[tuple[int, bytes]] = deque()
        self._pending_bytes = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes sent and not yet acknowledged."""
        return self._pending_bytes

    @property
    def num_pending(self) -> int:
        """Frames sent and not yet acknowledged."""
        return len(self._pending)

    @property
    def sent(self) -> int:
        """Number of the latest reliable frame."""
        return self._sent

    @property
    def forgotten(self) -> int:
        """Highest number that the other side has acknowledged."""
        return self._pending[0][0] - 1 if self._pending else self._sent

    def reliable(self, message: wire.Message) -> bytes:
        """The next numbered frame; kept until acknowledged. Raises ProtocolError for one that no peer would take."""
        frame = wire.encode(self._envelope(self._sent + 1, self.acknowledge, message))  # type: ignore[arg-type]
        if len(frame) > wire.FRAME_BYTES_MAX:
            raise ProtocolError(
                f"{type(message).__name__} of {len(frame)} bytes exceeds the limit of {wire.FRAME_BYTES_MAX}; split it"
            )
        self._sent += 1
        self._pending.append((self._sent, frame))
        self._pending_bytes += len(frame)
        return frame

    def unreliable(self, message: wire.Message) -> bytes:
        """A frame that may be lost."""
        return wire.encode(self._envelope(0, self.acknowledge, message))  # type: ignore[arg-type]

    def accept(self, number: int, acknowledged: int) -> bool:
        """Take note of a frame from the other side; True when its message is to be handled. Raises ProtocolError."""
        self.forget(acknowledged)
        if number == 0:
            return True
        if number <= self.received:
            return False
        if number != self.received + 1:
            raise ProtocolError(f"frame {number} arrived after frame {self.received}")
        self.received = number
        return True

    def forget(self, acknowledged: int) -> None:
        """The other side vouches for everything up to this number. Raises ProtocolError for a number never sent."""
        if acknowledged > self._sent:
            raise ProtocolError(f"frame {acknowledged} acknowledged, but only {self._sent} were sent")
        while self._pending and self._pending[0][0] <= acknowledged:
            self._pending_bytes -= len(self._pending.popleft()[1])

    def resend(self, received: int) -> list[bytes]:
        """After a reconnect: the kept frames above the number that the other side has received, in order."""
        return [frame for number, frame in self._pending if number > received]

    @property
    def kept(self) -> list[tuple[int, bytes]]:
        """(number, frame) of all that the other side has not acknowledged."""
        return list(self._pending)

    def resume(self, sent: int, kept: list[tuple[int, bytes]]) -> None:
        """Go on where this end's last process was: `kept` of `sent` frames are not acknowledged."""
        self._sent, self._pending = sent, deque(kept)
        self._pending_bytes = sum(len(frame) for _, frame in kept)

    def restart(self, received: int) -> None:
        """The other side is a new process that vouches for our frames up to `received` and numbers its own from 1.

        What it does not vouch for is kept.
        """
        self.received = self.acknowledge = 0
        self.renumber(received)

    def renumber(self, received: int) -> None:
        """If the other side has lost acknowledged frames, the kept ones take the numbers that it expects."""
        if received >= self.forgotten:
            self.forget(received)
            return
        decode = wire.decode_from_worker if self._envelope is wire.WorkerEnvelope else wire.decode_from_controller
        messages = [decode(frame).message for _, frame in self._pending]
        self._pending.clear()
        self._sent, self._pending_bytes = received, 0
        for message in messages:
            self.reliable(message)
