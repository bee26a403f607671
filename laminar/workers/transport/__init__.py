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

TRANSPORTS = ("tcp", "ucx", "nixl")
INSTALL = {
    "ucx": "pip install ucxx-cu12==0.52.0",
    "nixl": "pip install --no-deps nixl-cu12==1.5.1 (its dependencies would bring several GB of CUDA)",
}


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
    """The libraries are large: they are loaded only where they are chosen."""
    try:
        if name == "ucx":
            from laminar.workers.transport.ucx import UcxTransport

            return UcxTransport(progress_timeout_s)
        if name == "nixl":
            from laminar.workers.transport.nixl import NixlTransport

            return NixlTransport(progress_timeout_s)
    except ImportError as error:
        raise StartError(
            f'relay.transport = "{name}" needs a package that is not installed here ({error}): {INSTALL[name]}'
        ) from error
    if name == "tcp":
        return TcpTransport(progress_timeout_s, streams)
    raise ConfigError(f"no relay transport {name!r}; there is: {', '.join(TRANSPORTS)}")
