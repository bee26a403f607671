"""The interface of a transport."""

from typing import Protocol

RDMA, SHARED_MEMORY, TCP = "RDMA", "shared memory", "TCP"
"""What bytes may move over: `Link.medium`, `Transport.medium`."""


class LinkEnded(OSError):
    """The link is over: the peer closed it or died, or this side did."""


class Stalled(LinkEnded):
    """No byte moved for the progress deadline while bytes were due: the peer hangs, or the network between is gone."""


class Link(Protocol):
    """A connection to one peer. One thread may send while another receives; after any error only `close` is allowed."""

    peer: str
    """The other end's address, for messages."""
    medium: str
    """What its bytes really move over."""

    def promote(self) -> None:
        """The peer has proved who it is: move to what one does not share with a stranger (addresses of memory, say), if anything.

        Both ends call it at the same point of what they say to each other. Raises LinkEnded, Stalled.
        """

    def send(self, *parts: memoryview | bytes) -> None:
        """All of them, in order. Raises LinkEnded; Stalled when the peer takes nothing for the deadline."""

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`, to which nothing is written after this returned or raised.

        Raises LinkEnded; Stalled when nothing comes for the deadline.
        """

    def close(self) -> None:
        """End it; threads that wait in it get LinkEnded. Any thread, any number of times."""


class Listener(Protocol):
    """Where peers connect to."""

    port: int

    def accept(self) -> Link:
        """The next peer. Raises LinkEnded after `close`."""

    def close(self) -> None:
        """Take no more peers; links stay. Any thread, any number of times."""


class Transport(Protocol):
    """Makes listeners and links, whose progress deadline was given to its constructor."""

    name: str
    medium: str
    """The best that its links may move bytes over on this host; a link says what it really uses."""

    def listen(self, host: str, port: int = 0) -> Listener:
        """`port` 0: a free one. Raises StartError when the address cannot be bound."""

    def connect(self, host: str, port: int, timeout_s: float) -> Link:
        """One attempt. Raises LinkEnded when there is nobody within `timeout_s`."""
