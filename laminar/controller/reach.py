"""Where the controller listens, and under which address its workers dial it."""

from typing import NamedTuple

from laminar.config import Config
from laminar.controller import ssh
from laminar.controller.plan import url_of
from laminar.hosts import Host, is_local

EVERYWHERE = ("0.0.0.0", "::", "")


class Reach(NamedTuple):
    """Addresses of the controller."""

    bind: str
    dial: str

    def url(self, port: int | str) -> str:
        """What workers are given."""
        return url_of(self.dial, port)


def reach(config: Config, hosts: list[Host]) -> Reach:
    """By the configuration; for other hosts by this machine's route to the first of them. Raises ConfigError if that is unknown."""
    bind, advertise = config.controller.host, config.controller.advertise
    there = next((host.address for host in hosts if not is_local(host.address)), None)
    if there is None:
        return Reach(bind, advertise or bind)
    if not _is_loopback(bind) and bind not in EVERYWHERE:
        return Reach(bind, advertise or bind)
    dial = advertise or ssh.own_address_towards(config.controller.ssh, there)
    return Reach(bind if bind in EVERYWHERE else dial, dial)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
