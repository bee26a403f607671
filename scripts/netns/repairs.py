"""Faults of a relay in the middle of a version, and how long the survivors take to go on."""

import signal
import time
from collections.abc import Callable

from netns.network import Network
from netns.relays import Host, Relays, SpoiltError

NOTICE_LIMIT_S = 30.0
GOALS_S = {"kill -9": 0.05, "SIGSTOP": 1.0, "link down": 1.0, "hears nothing": 1.0, "is not heard": 1.0}
"""Longest until the fault is noticed."""


def repair(relays: Relays, fault: str, victim: int, after_s: float) -> dict[str, float]:
    """Seconds until the fault is noticed, and until every survivor is ready, each from the fault. Raises SpoiltError.

    It is done `after_s` after the version began to reach the victim.
    """
    version = relays.publish()
    host = relays.hosts[victim]
    while all(slot.version != version for slot in host.client.status().slots):
        time.sleep(0.002)
    time.sleep(after_s)
    survivors = [each for each in relays.hosts if each is not host]
    beside = [relays.hosts[victim - 1], *relays.hosts[victim + 1 : victim + 2]]
    hurt(relays.network, host, fault)
    began = time.monotonic()
    noticed = _noticed(relays, beside, survivors, host, began)
    relays.arrange(survivors)
    linked = time.monotonic() - began
    ended = relays.await_version(version, survivors) - began
    return {"noticed_s": noticed, "rearranged_s": linked, "all_ready_s": ended}


def hurt(network: Network, host: Host, fault: str) -> None:
    """Do it now."""
    faults: dict[str, Callable[[], None]] = {
        "kill -9": lambda: host.process.send_signal(signal.SIGKILL),
        "SIGSTOP": lambda: host.process.send_signal(signal.SIGSTOP),
        "link down": lambda: network.cable(host.number, "down"),
        "hears nothing": lambda: network.shape(host.number, "0", "in"),
        "is not heard": lambda: network.shape(host.number, "0", "out"),
    }
    faults[fault]()


def restore(relays: Relays, victim: int) -> None:
    """The victim comes back as a new relay. Raises SpoiltError."""
    relays.hosts[victim].end()
    relays.network.cable(victim, "up")
    relays.network.shape(victim, relays.network.rate)
    relays.hosts[victim] = relays.start(victim)
    relays.hosts[victim].client.connect()
    relays.arrange(relays.hosts)
    relays.broadcast()


def _noticed(relays: Relays, beside: list[Host], survivors: list[Host], victim: Host, began: float) -> float:
    """When a neighbour accused it. Raises SpoiltError when somebody accused another before."""
    word = f"{relays.epoch}: {victim.name}"
    while True:
        at = time.monotonic()
        if any(word in each.broken() for each in beside):
            return at - began
        for each in survivors:
            if any(other.startswith(f"{relays.epoch}: ") for other in each.broken() if other != word):
                raise SpoiltError(f"{each.name} accused another than {victim.name}: {each.broken()}")
        if at - began > NOTICE_LIMIT_S:
            raise SpoiltError(f"nobody noticed what happened to {victim.name} within {NOTICE_LIMIT_S:g} s")
        time.sleep(0.001)
