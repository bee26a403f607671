"""How many files and sockets this process may have open, and has (`RLIMIT_NOFILE`)."""

import os
import resource

from laminar.errors import StartError

LIMIT_MAX = 65_536  # programs that close whatever might be open, one by one, take seconds with more


def limit() -> int:
    """The soft limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> int:
    """Raise the soft limit as far as the hard one allows; what it is then. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def used() -> int:
    """How many are open."""
    return len(os.listdir("/proc/self/fd")) - 1  # one is the listing's own


def require(num: int, what: str) -> None:
    """Raise the limit. Raises StartError if it is less than `num`, which is what `what` need."""
    possible = raise_limit()
    if 0 <= possible < num:
        raise StartError(
            f"{what} need up to {num} open files and sockets, but this process may have {possible}: raise the limit with "
            f"`ulimit -n {num}` (`ulimit -Hn` shows how far you may; beyond that: limits.conf, or LimitNOFILE= of systemd)"
        )
