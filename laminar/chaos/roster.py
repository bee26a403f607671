"""Who is in a run, by its hosts file: the names that faults can strike."""

import msgspec

from laminar.controller.plan import addresses_of
from laminar.hosts import Host, is_local


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """Names of workers as they dial in. Those on other machines are in nobody's reach from here, but for `partition`."""

    rollouts: list[str]
    relays: list[str]
    ranks: list[str]
    """``trainer-0/0`` …, numbered over all trainer hosts."""
    others: list[str] = []
    """Addresses of hosts that are not this machine."""

    @property
    def workers(self) -> list[str]:
        """All of them."""
        return [*self.relays, *self.ranks, *self.rollouts]


def roster(hosts: list[Host]) -> Roster:
    """What of a cluster runs on this machine, named as `laminar.controller.plan` names it."""
    rollouts, ranks, num_rollouts, num_ranks, num_trainers = [], [], 0, 0, 0
    for host in hosts:
        here = is_local(host.address)
        if host.role == "rollout":
            rollouts += [f"rollout-{num_rollouts + at}" for at in range(host.replicas) if here]
            num_rollouts += host.replicas
        else:
            ranks += [f"trainer-{num_trainers}/{num_ranks + at}" for at in range(host.ranks) if here]
            num_ranks += host.ranks
            num_trainers += 1
    addresses = addresses_of(hosts)
    relays = [f"relay-{at}" for at, address in enumerate(addresses) if is_local(address)]
    others = [address for address in addresses if not is_local(address)]
    return Roster(rollouts=rollouts, relays=relays, ranks=ranks, others=others)
