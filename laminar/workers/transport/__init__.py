"""How bytes get from one host to the next: one small interface, one module per implementation.

All of them block and are used from threads. None trusts its library to notice a dead peer: the progress deadline is kept here.
"""

from laminar.errors import ConfigError, StartError
from laminar.workers.transport.base import RDMA, Link, LinkEnded, Listener, Stalled, Transport
from laminar.workers.transport.tcp import STREAMS_MAX, TcpTransport

__all__ = [
    "RDMA",
    "STREAMS_MAX",
    "TRANSPORTS",
    "Link",
    "LinkEnded",
    "Listener",
    "Stalled",
    "Transport",
    "make_transport",
]

TRANSPORTS = ("tcp", "ucx")


def make_transport(name: str, progress_timeout_s: float, *, streams: int = 1, require_rdma: bool = False) -> Transport:
    """`streams`: sockets per link, of `tcp`.

    Raises ConfigError for a name that there is not; StartError when its package is missing, or RDMA is required and not there.
    """
    transport = _made(name, progress_timeout_s, streams)
    if require_rdma and transport.medium != RDMA:
        raise StartError(
            f"relay.require_rdma: the transport {name} finds no RDMA device on this host and would use {transport.medium}; "
            "see docs/relays.md (Transports), or set relay.require_rdma = false"
        )
    return transport


def _made(name: str, progress_timeout_s: float, streams: int) -> Transport:
    if name == "tcp":
        return TcpTransport(progress_timeout_s, streams)
    if name == "ucx":
        try:
            from laminar.workers.transport.ucx import UcxTransport  # only where it is chosen: its libraries are large
        except ImportError as error:
            raise StartError(
                f'relay.transport = "ucx" needs ucxx, which is not installed here ({error}): pip install ucxx-cu12==0.52.0'
            ) from error
        return UcxTransport(progress_timeout_s)
    raise ConfigError(f"no relay transport {name!r}; there is: {', '.join(TRANSPORTS)}")
