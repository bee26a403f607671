"""Relays: who is there, in which order weights flow through them, and which one serves a replica. docs/policies/relays.md.

    master ──► rest of its rack ──► next rack ──► … ──► relays whose link is slow

A broken link is answered by a new epoch in which the accused is last; the first to be a party to two broken links in a row is lost.
A lost master is replaced by a complete holder of the newest version that is left.

Invariants:
* The order names every live relay once, the master first; its epoch grows with every change, so an epoch has one master.
* The relays of a rack are neighbours, but for slow ones.
* A replica pulls from the relay of its host only; the master's serves hosts that have none.
"""

from laminar.core import recovery, story, versions
from laminar.core.actions import ArrangeChain, StopWorker
from laminar.core.events import LinkBroken, LinkSlow, RelayJoined, VersionDropped, VersionHeld, VersionReady
from laminar.core.records import Replica, State
from laminar.core.relay_records import Relay
from laminar.core.turn import Turn
from laminar.ids import Version, WorkerId

BROKEN_MAX = 2  # one broken link may be its other end's fault; a party to two in a row is the fault of both


def source(state: State, host: str) -> Relay | None:
    """The relay from which replicas of a host pull; None while there is none, or theirs is away and may come back."""
    worker = state.relay_hosts.get(host)
    if worker is not None and (worker in state.relays or recovery.may_return(state, worker)):
        return state.relays.get(worker)
    return state.relays.get(state.chain.master) if state.chain.master else None


def newer(state: State, replica: Replica) -> Version | None:
    """The newest version that the replica could pull, if that is newer than what it holds."""
    version = versions.newest_of(source(state, replica.host))
    return version if version is not None and versions.is_newer(state, version, replica.version) else None


# ---- joining and losing ------------------------------------------------------------------------------------


def on_joined(turn: Turn, event: RelayJoined) -> None:
    """It enters the chain at the end of its rack and is filled by its neighbour. An older process of its name is fenced off."""
    state = turn.state
    known = state.relays.get(event.worker)
    if known and known.incarnation == event.incarnation:
        return
    if event.incarnation <= max(known.incarnation if known else 0, state.fenced.get(event.worker, 0)):
        reason = "this process was given up, or a newer one of its name was already here"
        turn.emit(StopWorker(cause=turn.cause, worker=event.worker, incarnation=event.incarnation, reason=reason))
        return
    if known:
        _remove(turn, known, "replaced by a new process, which holds none of its versions")
    state.relays[event.worker] = Relay(id=event.worker, incarnation=event.incarnation, host=event.host, rack=event.rack)
    state.relay_hosts[event.host] = event.worker
    state.silent.pop(event.worker, None)
    recovery.joined(turn, event.worker)
    turn.tell("joined", story.worker(event.worker))
    _arrange(turn, relink=True)
    if known:
        _forget(turn, known, "its relay was replaced by a new process")
    versions.publish(turn)


def lose(turn: Turn, relay: Relay, reason: str) -> None:
    """The survivors are chained anew. Without any relay the run goes on with what replicas hold, if one may come back."""
    _remove(turn, relay, reason)
    recovery.plan(turn, relay.id, reason, "relay")
    _arrange(turn)
    _fail_if_nothing_can_be_published(turn, relay.id, reason)
    _forget(turn, relay, f"the relay {relay.id} was lost: {reason}")


def lose_starting(turn: Turn, worker: WorkerId, reason: str) -> None:
    """It was started again and ended before it joined; once it is given up, the master's serves its host."""
    recovery.plan(turn, worker, reason, "relay")
    _sources_changed(turn)
    _fail_if_nothing_can_be_published(turn, worker, reason)
    versions.publish(turn)


def _fail_if_nothing_can_be_published(turn: Turn, lost: WorkerId, reason: str) -> None:
    """Without any relay no version reaches a replica; without the relay of its host no rank can publish. One may come back."""
    state = turn.state
    if not (state.relays or recovery.is_expected(turn, "relay")):
        turn.fail(f"the relay {lost} was lost: {reason}")
    is_trainers = any(state.relay_hosts.get(host) == lost for host in state.trainer.hosts.values())
    if is_trainers and not recovery.may_return(state, lost):
        turn.fail(
            f"the relay {lost} of a trainer's host is given up, and no weights can be published without it: {reason}; "
            "mend what ended it (its log is beside the others), or raise relay.restarts, and resume the run"
        )


def _remove(turn: Turn, relay: Relay, reason: str) -> None:
    state = turn.state
    del state.relays[relay.id]
    state.silent.pop(relay.id, None)
    state.fenced[relay.id] = max(relay.incarnation, state.fenced.get(relay.id, 0))
    turn.emit(StopWorker(cause=turn.cause, worker=relay.id, incarnation=relay.incarnation, reason=reason))
    turn.tell(f"lost: {reason}", story.worker(relay.id))


def _forget(turn: Turn, relay: Relay, reason: str) -> None:
    """What it alone held is gone, and what was being published to it; the trainer publishes it again if it still holds it."""
    state = turn.state
    under_way = [r.version for r in state.versions[-1:] if r.deadline and state.publishing_to == relay.id]
    for version in relay.held:
        versions.check_held(turn, version, reason)
    for version in under_way:
        versions.lose(turn, version, reason)


def _sources_changed(turn: Turn) -> None:
    """Some replicas may have to pull from another relay than before, or from none."""
    turn.state.review_due = True
    turn.look_again()


# ---- the chain ---------------------------------------------------------------------------------------------


def arrange(turn: Turn) -> None:
    """Chain the live relays, if the present chain is no longer the right one."""
    _arrange(turn)


def _arrange(turn: Turn, *, relink: bool = False) -> None:
    state, chain = turn.state, turn.state.chain
    master = _elect(state)
    order = _order(state, master) if master else []
    if (order, master) == (chain.order, chain.master) and not relink:
        return
    chain.epoch, chain.order, chain.master = chain.epoch + 1, order, master
    _sources_changed(turn)
    if master:
        turn.emit(ArrangeChain(cause=turn.cause, epoch=chain.epoch, order=list(order), master=master))
        turn.tell(f"chain {chain.epoch}: {' → '.join(order)}", *(story.worker(worker) for worker in order))


def _elect(state: State) -> WorkerId | None:
    """A complete holder of the newest version: on a trainer's host if there is one, else the present master, else the first."""
    present = state.chain.master if state.chain.master in state.relays else None
    if present and any(record.deadline for record in state.versions[-1:]):
        return present  # a version is being published to it
    holders = _holders_of_newest(state)
    beside_trainer = [relay for relay in holders if relay.host in state.trainer.hosts.values()]
    candidates = [relay.id for relay in beside_trainer or holders]
    if present in candidates:
        return present
    return next((worker for worker in [*state.chain.order, *candidates] if worker in candidates), None)


def _holders_of_newest(state: State) -> list[Relay]:
    """Relays that hold the newest version that is left; all if none holds anything."""
    for record in reversed(state.versions):
        holders = [relay for relay in state.relays.values() if record.version in relay.held]
        if holders:
            return holders
    return list(state.relays.values())


def _order(state: State, master: WorkerId) -> list[WorkerId]:
    """The master, then rack by rack; racks as they are chained now, new ones last, relays of a rack as they joined."""
    relays = state.relays
    slow = [relay.id for relay in relays.values() if relay.slow_since and relay.id != master]
    fast = [relay.id for relay in relays.values() if relay.id not in slow]
    chained = [worker for worker in [master, *state.chain.order] if worker in fast]
    racks = dict.fromkeys(relays[worker].rack for worker in [*chained, *fast])
    others = [worker for rack in racks for worker in fast if relays[worker].rack == rack and worker != master]
    return [master, *others, *sorted(slow, key=lambda worker: relays[worker].slow_since)]


# ---- links -------------------------------------------------------------------------------------------------


def on_link_slow(turn: Turn, event: LinkSlow) -> None:
    """The slow end goes to the tail, where it holds nobody up, and stays there; the master cannot, so its neighbour does."""
    if not _is_current(turn, event):
        return
    state = turn.state
    worker, peer = state.relays[event.worker], state.relays[event.peer]
    slow = peer
    if not peer.slow_since:
        is_own = worker.called_slow and worker.id != state.chain.master
        slow = worker if is_own or peer.id == state.chain.master else peer
        worker.called_slow = True
    if slow.slow_since:
        turn.tell(f"the link between {worker.id} and {peer.id} is slow, at the tail already", story.worker(slow.id))
        return
    _to_tail(turn, slow)
    _arrange(turn)


def on_link_broken(turn: Turn, event: LinkBroken) -> None:
    """An end that the controller cannot reach either is lost; else the one to blame, or the accused goes to the tail."""
    state = turn.state
    if not _is_current(turn, event):
        return
    worker, peer = state.relays[event.worker], state.relays[event.peer]
    worker.num_broken += 1
    peer.num_broken += 1
    suspects = [relay for relay in (peer, worker) if relay.id in state.silent]
    suspects = suspects or [relay for relay in (peer, worker) if relay.num_broken >= BROKEN_MAX][:1]
    for relay in suspects:
        lose(turn, relay, f"the link between {worker.id} and {peer.id} broke")
    if not suspects:
        _to_tail(turn, worker if peer.id == state.chain.master else peer)
        _arrange(turn, relink=True)


def _is_current(turn: Turn, event: LinkBroken | LinkSlow) -> bool:
    """Whether both ends are in the chain of the epoch that the event speaks of."""
    relays, epoch = turn.state.relays, turn.state.chain.epoch
    if event.epoch == epoch and event.worker in relays and event.peer in relays and event.worker != event.peer:
        return True
    text = f"word of {event.worker} about its link to {event.peer} in epoch {event.epoch} ignored, the chain is {epoch}"
    turn.tell(text, story.worker(event.worker), story.worker(event.peer))
    return False


def _to_tail(turn: Turn, relay: Relay) -> None:
    relay.slow_since = turn.cause
    turn.tell("goes to the tail of the chain", story.worker(relay.id))


# ---- what they hold ----------------------------------------------------------------------------------------


def on_ready(turn: Turn, event: VersionReady) -> None:
    """The relay that it was published to holds it: from now on replicas may pull it there."""
    worker = event.worker or turn.state.publishing_to
    relay = turn.state.relays.get(worker) if worker else None
    if relay is None:
        turn.tell(f"word of {worker}, which was given up, ignored", story.version(event.version))
        return
    if versions.hold(turn, relay, event.version, event.digest):
        turn.tell(f"{event.num_bytes} bytes", story.version(event.version))
    _arrange(turn)


def on_held(turn: Turn, event: VersionHeld) -> None:
    """One more complete holder; the link that brought it works."""
    relay = turn.state.relays.get(event.worker)
    if relay is None or not versions.hold(turn, relay, event.version, event.digest):
        turn.tell(f"word of {event.worker} about {event.version} ignored", story.version(event.version))
        return
    order = turn.state.chain.order
    for worker in order[max(0, order.index(relay.id) - 1) : order.index(relay.id) + 1]:
        turn.state.relays[worker].num_broken = 0
    _arrange(turn)


def on_dropped(turn: Turn, event: VersionDropped) -> None:
    """Nobody pulls it there any more. One that lost the newest, whose bytes have changed in its memory, is filled again."""
    relay = turn.state.relays.get(event.worker)
    if relay is None:
        return
    newest = versions.newest(turn.state)
    is_newest = newest is not None and newest.version == event.version and event.version in relay.held
    drop(turn, relay, event.version)
    _arrange(turn, relink=is_newest)


def drop(turn: Turn, relay: Relay, version: Version) -> None:
    """The relay cannot give this version any more."""
    if version in relay.held:
        relay.held.remove(version)
        turn.state.review_due = True
        versions.check_held(turn, version, f"{relay.id} recycled its slot, the last that held it")
        turn.look_again()
