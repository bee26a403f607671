"""Where the controller listens, and under which address its workers dial it."""

from typing import NamedTuple

from laminar.config import Config
from laminar.controller import ssh
from laminar.controller.plan import addresses_of, url_of
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
    """By the configuration; for other hosts by this machine's route to one of them. Raises ConfigError if there is none."""
    bind, advertise = config.controller.host, config.controller.advertise
    there = [address for address in addresses_of(hosts) if not is_local(address)]
    if not there:
        return Reach(bind, advertise or bind)
    if not _is_loopback(bind) and bind not in EVERYWHERE:
        return Reach(bind, advertise or bind)
    dial = advertise or ssh.own_address_towards(config.controller.ssh, there)
    return Reach(bind if bind in EVERYWHERE else dial, dial)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
