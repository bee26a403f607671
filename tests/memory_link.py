"""Links in memory, whose peer has said everything already: for one half of a link, without the other."""

from laminar.workers.transport import LinkEnded


class Wire:
    """A link whose peer has said everything already (`said`); `answered` is what goes to it."""

    peer, medium = "peer", "memory"

    def __init__(self) -> None:
        self.said, self.answered = bytearray(), bytearray()

    def send(self, *parts: memoryview | bytes) -> None:
        self.answered += b"".join(parts)

    def receive_into(self, view: memoryview) -> None:
        if len(self.said) < len(view):
            raise LinkEnded("peer closed the link")
        view[:] = self.said[: len(view)]
        del self.said[: len(view)]


class Peer(Wire):
    """Writes what it says into the link of the other end."""

    def __init__(self, other: Wire) -> None:
        super().__init__()
        self.answered = other.said
