"""Which relays keep which old versions: those that replicas still hold, or that queued siblings wait for.

Should the last replica of a version be lost, its trajectories go on where a relay has that version (`laminar.core.failover`). So
what trajectories may still need is kept on HOSTS hosts, by relays from which replicas pull, if there are so many. How a relay keeps
it, in a slot or as a delta, is its own business; when it cannot, it says `VersionDropped`.
"""

from laminar.core import relays
from laminar.core.actions import RetainVersions
from laminar.core.records import State
from laminar.core.turn import Turn
from laminar.ids import Version, WorkerId

HOSTS = 2  # one host may be lost with its replicas and its relay; more would cost memory on each


def review(turn: Turn) -> None:
    """Tell every relay whose list has changed."""
    state = turn.state
    serving = _serving(state)
    keepers = {version: _keepers(state, version, serving) for version in needed(state)}
    for relay in state.relays.values():
        wanted = [version for version in relay.held if relay.id in keepers.get(version, [])]
        if wanted != relay.retained:
            relay.retained = wanted
            turn.emit(RetainVersions(cause=turn.cause, worker=relay.id, versions=list(wanted)))


def needed(state: State) -> dict[Version, None]:
    """Versions that trajectories run under, or may go on under."""
    held = (replica.version for replica in state.replicas.values())
    queued = (state.groups[group].version for group in state.requeue)
    return {version: None for version in (*held, *queued) if version is not None}


def _serving(state: State) -> dict[WorkerId, None]:
    """Relays from which some replica pulls."""
    hosts = dict.fromkeys(replica.host for replica in state.replicas.values())
    found = (relays.source(state, host) for host in hosts)
    return {relay.id: None for relay in found if relay is not None}


def _keepers(state: State, version: Version, serving: dict[WorkerId, None]) -> list[WorkerId]:
    """Those that keep it already come first, then in the order of the chain; a relay that serves nobody only if no other has it."""
    holders = [worker for worker in state.chain.order if version in state.relays[worker].held]
    useful = [worker for worker in holders if worker in serving] or holders
    return sorted(useful, key=lambda worker: version not in state.relays[worker].retained)[:HOSTS]
