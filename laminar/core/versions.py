"""Weight versions: which is the newest to pull, and how far apart two are."""

from laminar.core import story
from laminar.core.actions import PublishVersion, RaiseAlarm
from laminar.core.events import ShardsWritten, VersionLost, VersionReady
from laminar.core.records import Branch, State, VersionRecord
from laminar.core.turn import Turn
from laminar.ids import Version

PUBLISH_TRIES_MAX = 3  # a version that the relay lost three times will not fare better the fourth time
RECORDS_MAX = 64  # far more than replicas can lag; older ones are in the database


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


def staleness(branches: list[Branch], new: Version, old: Version) -> int:
    """Trainer steps from `old` to `new`; across a restore from the last common step. Never below zero."""
    common = old.step
    for branch in branches:
        if old.branch < branch.branch <= new.branch:
            common = min(common, branch.fork_step)
    return max(0, new.step - common)


def made(turn: Turn) -> None:
    """The trainer holds a new version: publish it as soon as a relay is there."""
    record = VersionRecord(version=turn.trainer_version)
    records, readable = turn.state.versions, newest(turn.state)
    records.append(record)
    if len(records) > RECORDS_MAX:
        del records[1 if records[0] is readable else 0]
    publish(turn)


def publish(turn: Turn) -> None:
    """Ask the trainer to hand over its present weights, unless they are published, under way or given up."""
    state = turn.state
    if not (state.versions and state.trainer.ready and state.relay and not state.trainer.running):
        return
    record = state.versions[-1]
    if (
        record.version != turn.trainer_version
        or record.ready
        or record.deadline
        or record.num_tries >= PUBLISH_TRIES_MAX
    ):
        return
    record.num_tries += 1
    record.deadline = turn.at + turn.settings.publish_timeout_s
    record.awaited_until = turn.at + turn.settings.await_publication_s if turn.settings.await_publication_s else 0.0
    turn.emit(PublishVersion(cause=turn.cause, version=record.version))
    turn.tell("publication started", story.version(record.version))


def is_awaited(state: State) -> bool:
    """Whether a replica with nothing running had better wait a moment for the newest weights."""
    return bool(state.versions) and state.versions[-1].awaited_until > state.at


def on_shards_written(turn: Turn, event: ShardsWritten) -> None:
    """The trainer may die now; whether the version can be read is the relay's word."""
    record = find(turn.state, event.version)
    if record is not None:
        record.written = True
    turn.tell(f"shards written, the trainer waited {event.stall_s:.3f} s", story.version(event.version))


def on_ready(turn: Turn, event: VersionReady) -> None:
    """From now on replicas may pull it."""
    record = find(turn.state, event.version)
    if record is None or record.ready or record.void:
        return
    record.ready, record.lost, record.deadline, record.awaited_until = True, "", 0.0, 0.0
    record.digest = event.digest
    record.published_at = turn.at
    turn.tell(f"published, {event.num_bytes} bytes, digest {event.digest}", story.version(event.version))
    turn.state.dirty.update(dict.fromkeys(turn.state.replicas))


def abandon(turn: Turn, reason: str) -> None:
    """The trainer is gone: what it was handing over will never be complete. What the relay has whole may still become ready."""
    for record in turn.state.versions[-1:]:
        if record.ready or record.written or record.lost:
            continue
        record.void, record.lost, record.deadline, record.awaited_until = True, reason, 0.0, 0.0
        turn.state.dirty.update(dict.fromkeys(turn.state.replicas))
        turn.tell(f"lost with the trainer: {reason}", story.version(record.version))


def on_lost(turn: Turn, event: VersionLost) -> None:
    """The version is skipped, or tried again while the trainer still holds it."""
    lose(turn, event.version, event.reason)


def lose(turn: Turn, version: Version, reason: str) -> None:
    """Record that `version` did not get through."""
    record = find(turn.state, version)
    if record is None or record.ready:
        return
    record.lost, record.deadline, record.awaited_until = reason, 0.0, 0.0
    turn.state.dirty.update(dict.fromkeys(turn.state.replicas))
    turn.tell(f"publication failed: {reason}", story.version(version))
    publish(turn)
    if record.deadline:
        return
    text = f"{version} was not published: {reason}; replicas go on with what they have until the next version"
    turn.emit(RaiseAlarm(cause=turn.cause, name="version-lost", text=text))
    readable, bound = newest(turn.state), turn.settings.max_staleness
    if record.num_tries >= PUBLISH_TRIES_MAX and readable is None:
        turn.fail(f"the first weights could not be published after {record.num_tries} tries: {reason}")
    elif readable and bound is not None and staleness(turn.state.branches, version, readable.version) > bound:
        turn.fail(
            f"{version} could not be published ({reason}), and {readable.version} is beyond max_staleness = {bound}"
        )
