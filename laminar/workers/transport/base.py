"""The interface of a transport."""

from typing import Protocol


class LinkEnded(OSError):
    """The link is over: the peer closed it or died, or this side did."""


class Stalled(LinkEnded):
    """No byte moved for the progress deadline while bytes were due: the peer hangs, or the network between is gone."""


class Link(Protocol):
    """A connection to one peer. One thread may send while another receives; after any error only `close` is allowed."""

    peer: str
    """The other end's address, for messages."""

    def send(self, *parts: memoryview | bytes) -> None:
        """All of them, in order. Raises LinkEnded; Stalled when the peer takes nothing for the deadline."""

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`. Raises LinkEnded; Stalled when nothing comes for the deadline."""

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
    """Makes listeners and links whose deadline is `progress_timeout_s`."""

    name: str
    medium: str
    """What it really moves bytes over: ``TCP``, ``shared memory``, ``RDMA``."""

    def __init__(self, progress_timeout_s: float) -> None: ...

    def listen(self, host: str, port: int = 0) -> Listener:
        """Raises StartError when the address cannot be bound."""

    def connect(self, host: str, port: int, timeout_s: float) -> Link:
        """Raises LinkEnded when there is nobody within `timeout_s`."""
