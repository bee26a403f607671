"""How bytes get from one host to the next: one small interface, one module per implementation.

All of them block and are used from threads. None trusts its library to notice a dead peer: the progress deadline is kept here.
"""

from laminar.errors import ConfigError
from laminar.workers.transport.base import Link, LinkEnded, Listener, Stalled, Transport
from laminar.workers.transport.tcp import TcpTransport

__all__ = ["Link", "LinkEnded", "Listener", "Stalled", "Transport", "make_transport"]

TRANSPORTS: dict[str, type[Transport]] = {"tcp": TcpTransport}


def make_transport(name: str, progress_timeout_s: float) -> Transport:
    """Raises ConfigError for a name that there is not."""
    if name not in TRANSPORTS:
        raise ConfigError(f"no relay transport {name!r}; there is: {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name](progress_timeout_s)
