"""Weight versions: publication, which relays hold them, which is the newest to pull, and how far apart two are."""

from laminar.core import recovery, story
from laminar.core.actions import PublishVersion, RaiseAlarm
from laminar.core.events import ShardsWritten, VersionLost
from laminar.core.records import State, VersionRecord
from laminar.core.relay_records import Relay
from laminar.core.trainer_records import Branch
from laminar.core.turn import Turn
from laminar.ids import Version, WorkerId

RETRY_PAUSES_S = (0.0, 1.0, 5.0)
"""Before the second, third and fourth try: at once, because another relay may take it; then for what may be over soon, such as the
pull that reads from the last slot. A version that got through in none of them is left to the next one."""
PUBLISH_TRIES_MAX = len(RETRY_PAUSES_S) + 1
RECORDS_MAX = 64  # and those of versions that somebody holds; all others are in the database


def newest(state: State) -> VersionRecord | None:
    """The last published version that can be pulled. Publication order counts, not step numbers."""
    for record in reversed(state.versions):
        if record.ready:
            return record
    return None


def find(state: State, version: Version) -> VersionRecord | None:
    """The record of `version`, if it is not forgotten."""
    for record in reversed(state.versions):
        if record.version == version:
            return record
    return None


def is_coming(record: VersionRecord) -> bool:
    """Whether its publication is under way, or to be tried again."""
    return record.deadline > 0.0 or record.retry_at > 0.0


def newest_of(relay: Relay | None) -> Version | None:
    """The last version that the relay holds."""
    return relay.held[-1] if relay is not None and relay.held else None


def is_newer(state: State, one: Version, other: Version | None) -> bool:
    """Whether `one` was made after `other`; what is forgotten, or None, is older than anything."""
    for record in reversed(state.versions):
        if record.version in (one, other):
            return record.version == one != other
    return other is None


def staleness(branches: list[Branch], new: Version, old: Version) -> int:
    """Trainer steps from `old` to `new`; across a restore from the last common step. Never below zero."""
    common = old.step
    for branch in branches:
        if old.branch < branch.branch <= new.branch:
            common = min(common, branch.fork_step)
    return max(0, new.step - common)


def made(turn: Turn) -> None:
    """The trainer holds a new version: publish it as soon as a relay is there."""
    for record in turn.state.versions[-1:]:
        record.retry_at = 0.0
    turn.state.versions.append(VersionRecord(version=turn.trainer_version))
    _forget_old(turn.state)
    publish(turn)


def _forget_old(state: State) -> None:
    """Replicas may begin groups under what they hold for as long as no relay brings anything newer."""
    surplus = len(state.versions) - RECORDS_MAX
    if surplus <= 0:
        return
    held = [version for relay in state.relays.values() for version in relay.held]
    held += [version for replica in state.replicas.values() for version in (replica.version, replica.target) if version]
    kept, readable = dict.fromkeys(held), newest(state)
    old = [record for record in state.versions[:-1] if record.version not in kept and record is not readable]
    forgotten = dict.fromkeys(record.version for record in old[:surplus])
    state.versions = [record for record in state.versions if record.version not in forgotten]


def publish(turn: Turn) -> None:
    """Ask the trainer to hand over its present weights, unless they are published, under way or given up. Ends a pause.

    A rank can write to the relay of its own host only: while one of these is away, nothing is published.
    """
    state = turn.state
    for record in state.versions[-1:]:
        record.retry_at = 0.0
    if why_not_published(turn):
        return
    hosts, record = dict.fromkeys(state.trainer.hosts.values()), state.versions[-1]
    state.publishing_to, record.written = _collector(state), False
    state.num_publications += 1
    record.publication = state.num_publications
    record.num_tries += 1
    record.deadline = turn.at + turn.settings.publish_timeout_s
    record.awaited_until = turn.at + turn.settings.await_publication_s if turn.settings.await_publication_s else 0.0
    relay = state.publishing_to if len(hosts) > 1 else None
    turn.emit(PublishVersion(cause=turn.cause, version=record.version, publication=record.publication, relay=relay))
    turn.tell(f"publication {record.publication} started, to {state.publishing_to}", story.version(record.version))


def why_not_published(turn: Turn) -> str:
    """Why the trainer is not asked to hand over its present weights now; empty = it is."""
    state = turn.state
    if not (state.versions and state.trainer.ready):
        return "the trainer is not ready"
    record = state.versions[-1]
    if record.ready:
        return "it is published"
    if record.deadline:
        return "its publication is under way"
    if record.retry_at:
        return f"its publication failed and is tried again in {max(0.0, record.retry_at - turn.at):.1f} s"
    if record.version != turn.trainer_version:
        return "the trainer no longer holds it"
    if record.num_tries >= PUBLISH_TRIES_MAX:
        return f"it was given up after {record.num_tries} tries: {record.lost}"
    if state.trainer.running:
        return "the trainer is at a step, after which it holds the next version"
    if not state.chain.master:
        return "there is no relay"
    hosts = dict.fromkeys(state.trainer.hosts.values())
    lacking = [host for host in hosts if _lacks_relay(state, host, is_only=len(hosts) == 1)]
    return f"the relay of the trainer's host {lacking[0]} is away" if lacking else ""


def _lacks_relay(state: State, host: str, *, is_only: bool) -> bool:
    """Whether ranks of this host are to wait for its relay; an only host may have none that the core knows of."""
    worker = state.relay_hosts.get(host)
    if worker in state.relays:
        return False
    return not is_only or (worker is not None and recovery.may_return(state, worker))


def _collector(state: State) -> WorkerId | None:
    """The first relay of the chain that is on a trainer's host, so the master if it is; without any, the master."""
    hosts = state.trainer.hosts.values()
    return next((worker for worker in state.chain.order if state.relays[worker].host in hosts), state.chain.master)


def is_awaited(state: State, relay: Relay | None) -> bool:
    """Whether a replica with nothing running had better wait a moment for the newest weights to reach its relay."""
    record = state.versions[-1] if state.versions else None
    return record is not None and record.awaited_until > state.at and newest_of(relay) != record.version


def on_shards_written(turn: Turn, event: ShardsWritten) -> None:
    """The trainer may die now; whether the version can be read is the relay's word."""
    record = find(turn.state, event.version)
    if record is not None and event.publication in (0, record.publication):
        record.written = True
    turn.tell(f"shards written, the trainer waited {event.stall_s:.3f} s", story.version(event.version))


def hold(turn: Turn, relay: Relay, version: Version, digest: str) -> bool:
    """`relay` holds the version: replicas there may pull it. False if it is unknown, held already, or not the same bytes."""
    state = turn.state
    record = find(state, version)
    if record is None or record.void or version in relay.held or (record.ready and record.digest != digest):
        return False
    if not record.ready:
        record.ready, record.lost, record.num_tries = True, "", 0
        record.deadline = record.retry_at = 0.0
        record.digest, record.published_at = digest, turn.at
        turn.tell(f"published, digest {digest}", story.version(version))
    recovery.worked(turn, relay.id, turn.at)
    position = next((i for i, held in enumerate(relay.held) if is_newer(state, held, version)), len(relay.held))
    relay.held.insert(position, version)
    if all(version in other.held for other in state.relays.values()):
        record.awaited_until = 0.0
    turn.look_again()
    state.review_due = True
    return True


def check_held(turn: Turn, version: Version, reason: str) -> None:
    """A relay holds it no longer; if no other does, it is lost until the trainer publishes it again.

    When no relay holds anything any more, what was given up after some tries is tried again, if the trainer still holds it.
    """
    record = find(turn.state, version)
    if record is None or not record.ready or any(version in relay.held for relay in turn.state.relays.values()):
        return
    record.ready, record.lost = False, reason
    last = turn.state.versions[-1]
    if newest(turn.state) is None:
        last.num_tries = 0
    if record is last:
        lose(turn, version, reason)
    publish(turn)


def abandon(turn: Turn, reason: str) -> None:
    """The trainer is gone: what it was handing over will never be complete. What the relay has whole may still become ready."""
    for record in turn.state.versions[-1:]:
        record.retry_at = 0.0
        if record.ready or record.written or record.lost:
            continue
        record.void, record.lost, record.deadline, record.awaited_until = True, reason, 0.0, 0.0
        turn.look_again()
        turn.tell(f"lost with the trainer: {reason}", story.version(record.version))


def on_lost(turn: Turn, event: VersionLost) -> None:
    """The version is skipped, or tried again while the trainer still holds it. The first word about a publication counts."""
    record = find(turn.state, event.version)
    if event.publication and record and not (record.deadline and record.publication == event.publication):
        text = f"word about publication {event.publication}, which is over, ignored: {event.reason}"
        turn.tell(text, story.version(event.version))
        return
    lose(turn, event.version, event.reason)


def _try_again(turn: Turn, record: VersionRecord) -> None:
    """At once, or after a pause if that was in vain before. The loss of an older version than the last disturbs no pause."""
    last, tries = turn.state.versions[-1], record.num_tries
    pause_s = RETRY_PAUSES_S[tries - 1] if record is last and 0 < tries < PUBLISH_TRIES_MAX else 0.0
    if pause_s and not why_not_published(turn):
        record.retry_at = turn.at + pause_s
    elif not last.retry_at:
        publish(turn)


def check(turn: Turn) -> None:
    """Ask the trainer again if it is time to, and give up a publication that has lasted too long."""
    for record in turn.state.versions[-1:]:
        if 0.0 < record.awaited_until <= turn.at:
            record.awaited_until = 0.0
            turn.look_again()
        if 0.0 < record.deadline <= turn.at:
            lose(turn, record.version, "no word from the relay in time")
        elif 0.0 < record.retry_at <= turn.at:
            publish(turn)


def lose(turn: Turn, version: Version, reason: str) -> None:
    """Record that `version` did not get through."""
    record = find(turn.state, version)
    if record is None or record.ready:
        return
    record.lost, record.deadline, record.awaited_until = reason, 0.0, 0.0
    turn.look_again()
    turn.tell(f"publication failed: {reason}", story.version(version))
    _try_again(turn, record)
    if record.deadline or turn.state.stopping:
        return
    until = f"it is tried again in {record.retry_at - turn.at:g} s" if record.retry_at else "the next version"
    text = f"{version} was not published: {reason}; replicas go on with what they have until {until}"
    turn.emit(RaiseAlarm(cause=turn.cause, name="version-lost", text=text))
    if record.retry_at:
        return
    readable, bound = newest(turn.state), turn.settings.max_staleness
    if record.num_tries >= PUBLISH_TRIES_MAX and readable is None:
        turn.fail(
            f"no relay holds any weights; {version} could not be published after {record.num_tries} tries: {reason}"
        )
    elif readable and bound is not None and staleness(turn.state.branches, version, readable.version) > bound:
        turn.fail(
            f"{version} could not be published ({reason}), and {readable.version} is beyond max_staleness = {bound}"
        )
