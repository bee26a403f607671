"""The worker's channel to the controller: `Link` for asyncio workers, `ThreadLink` for blocking ones."""

from laminar.workers.link.asynchronous import Link, LinkClosed, LinkRefused, Orphaned
from laminar.workers.link.threaded import ThreadLink
from laminar.workers.link.tokens import TokensUnavailable

__all__ = ["Link", "LinkClosed", "LinkRefused", "Orphaned", "ThreadLink", "TokensUnavailable"]
