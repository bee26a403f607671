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

    def reliable(self, message: wire.Message) -> bytes:
        """The next numbered frame; kept until acknowledged."""
        self._sent += 1
        frame = wire.encode(self._envelope(self._sent, self.acknowledge, message))  # type: ignore[arg-type]
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
