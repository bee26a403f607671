"""What a run's database says of a time range."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from laminar.core import events
from laminar.core.events import AnyEvent
from laminar.errors import ConfigError
from laminar.ids import TrajectoryId, format_id
from laminar.replay.recording import EVENTS_AT_ONCE, Recording
from laminar.trace.timeline import Arrow, Instant, Lane, Level, Overlapping, Slice, Timeline

RECORDS_MAX = 1_000_000  # some 200 MB of JSON, about as much as Perfetto's UI takes
CONTROLLER = "controller"
NAMES = {
    "train": "train step {}",
    "publish": "publish {}",
    "pull": "pull {}",
    "checkpoint": "checkpoint {}",
    "decode": "decode {}",
}
TOLD = (
    events.RunStarted, events.ControllerRestarted, events.ControllerPaused, events.StopRequested, events.FailureReported,
    events.StorageFailed, events.StorageRecovered, events.ReplicaJoined, events.WorkerDisconnected, events.WorkerReturned,
    events.WorkerLost, events.ReplicaRefreshFailed, events.EvaluationFinished, events.EvaluationFailed, events.TrainerRankReady,
    events.StepFailed, events.CheckpointFailed, events.RelayJoined, events.VersionReady, events.VersionLost, events.VersionHeld,
    events.VersionDropped, events.LinkBroken, events.LinkSlow, events.DrainRequested, events.HoldChanged, events.DecisionResolved,
)  # fmt: skip
"""Events that are shown as such."""


class Window(NamedTuple):
    """What ended after `begin`, and not after `end`; seconds since the epoch."""

    begin: float
    end: float


def whole(recording: Recording) -> Window:
    """From before the first event to the last thing that is known."""
    began = math.nextafter(recording.lives[0].boots[0].started, 0.0)
    ends = [
        recording.query(f"SELECT max({column}) FROM {table}")[0][0]
        for table, column in (("spans", "end"), ("alarms", "at"))
    ]
    lasts = [
        recording.query("SELECT at FROM events WHERE (boot, seq) = (?, ?)", *recording.last(life))
        for life in recording.lives
    ]
    return Window(began, max([began, *(end for end in ends if end), *(rows[0][0] for rows in lasts if rows)]))


def of_steps(recording: Recording, first: int, last: int) -> Window:
    """From the end of the step before `first` to the end of `last`. Raises ConfigError for steps that the run has not made."""
    ends = dict(
        recording.query(
            "SELECT CAST(substr(version, 2) AS INTEGER), max(end) FROM spans WHERE kind = 'train' GROUP BY 1"
        )
    )
    if not ends:
        raise ConfigError(f"{recording.path} has no train step")
    missing = [step for step in (first, last) if step not in ends]
    if missing or first > last:
        raise ConfigError(
            f"--steps {first}-{last}: the log has steps {min(ends)} to {max(ends)}, and the first is not after the last"
        )
    return Window(ends.get(first - 1, whole(recording).begin), ends[last])


def read(recording: Recording, window: Window) -> Timeline:
    """Raises ConfigError if that is too much for one trace, RecordingError if it cannot be read."""
    _check_size(recording, window)
    timeline = Timeline(begin=window.begin, end=window.end)
    timeline.slices += _spans(recording, window)
    _add_moves(timeline, recording, window)
    _add_levels(timeline, recording, window)
    _add_events(timeline, recording, window)
    query = "SELECT at, name, text FROM alarms WHERE at > ? AND at <= ? ORDER BY at"
    for at, name, text in recording.query(query, *window):
        timeline.instants.append(Instant(Lane(CONTROLLER, "alarms"), name, at, {"text": text}))
    return timeline


def _check_size(recording: Recording, window: Window) -> None:
    (spans,) = recording.query("SELECT count(*) FROM spans WHERE end > ? AND end <= ?", *window)[0]
    num = spans + sum(last - first for _, first, last in _places(recording, window))
    if num > RECORDS_MAX:
        raise ConfigError(
            f"{window.end - window.begin:,.0f} s of this run are {num:,} records, and a trace has room for {RECORDS_MAX:,}: choose "
            "a part of it with --steps 10-20 or --from and --to"
        )


def _spans(recording: Recording, window: Window) -> Iterator[Slice]:
    query = "SELECT worker, kind, start, end, busy_s, version FROM spans WHERE end > ? AND end <= ? ORDER BY start"
    for worker, kind, start, end, busy_s, what in recording.query(query, *window):
        name = NAMES.get(kind, kind + " {}").format(what[1:] if what.startswith("s") else what)
        yield Slice(Lane(worker, kind), name, start, end, {"busy_s": busy_s, "of": what})


# ---- moves and levels --------------------------------------------------------------------------------------


def _add_moves(timeline: Timeline, recording: Recording, window: Window) -> None:
    """A slice at each end of what went the same way at once, and an arrow between them."""
    together: dict[tuple[str, str, float], list[tuple[int, int, float]]] = {}
    columns = "trajectory, source, destination, num_tokens, start, end"
    query = f"SELECT {columns} FROM moves WHERE end > ? AND end <= ? ORDER BY start, rowid"
    for trajectory, source, destination, num_tokens, start, end in _query_if_there(recording, "moves", query, *window):
        together.setdefault((source, destination, start), []).append((trajectory, num_tokens, end))
    for (source, destination, start), moved in together.items():
        ends = [end for _, _, end in moved]
        args = {
            "trajectories": [f"t{format_id(t)}" for t, _, _ in moved],
            "response_tokens": sum(num for _, num, _ in moved),
        }
        out = Slice(Lane(source, "repack"), f"{len(moved)} to {destination}", start, max(ends), args)
        into = Slice(Lane(destination, "repack"), f"{len(moved)} from {source}", min(ends), max(ends), args)
        timeline.slices += [out, into]
        timeline.arrows.append(Arrow("move", out, into))


def _add_levels(timeline: Timeline, recording: Recording, window: Window) -> None:
    columns = "at, buffer_groups, in_flight, generating, kv_tokens, kv_tokens_max"
    query = f"SELECT {columns} FROM levels WHERE at > ? AND at <= ? ORDER BY at"
    for at, buffer, in_flight, generating, kv, kv_max in _query_if_there(recording, "levels", query, *window):
        timeline.levels += [
            Level(CONTROLLER, "buffer", at, {"groups": buffer}),
            Level(CONTROLLER, "in flight", at, {"trajectories": in_flight}),
            Level(CONTROLLER, "generating", at, {"trajectories": generating}),
            Level(CONTROLLER, "KV use of all replicas", at, {"percent": round(100 * kv / max(1, kv_max), 3)}),
        ]


def _query_if_there(recording: Recording, table: str, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Rows of a table that older runs do not have."""
    there = recording.query("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", table)
    return recording.query(query, *parameters) if there else []


# ---- events ------------------------------------------------------------------------------------------------


def _add_events(timeline: Timeline, recording: Recording, window: Window) -> None:
    finished: dict[TrajectoryId, float] = {}
    for event in _events(recording, window):
        if isinstance(event, events.ReplicaReported):
            timeline.levels.append(Level(event.worker, "KV", event.at, {"tokens": event.kv_tokens}))
            finished |= {each.trajectory: event.at for each in event.finished}
            timeline.overlapping += [_reward(recording, event, each, finished) for each in event.rewarded]
        elif isinstance(event, TOLD):
            timeline.instants.append(_instant(event))


def _reward(
    recording: Recording,
    report: events.ReplicaReported,
    rewarded: events.RewardedAttempt,
    finished: dict[TrajectoryId, float],
) -> Overlapping:
    """From the last token to the reward: environment, reward code, and waiting for their processes."""
    start = finished.pop(rewarded.trajectory, None)
    if start is None:  # before the window
        rows = recording.query("SELECT finished_at FROM trajectories WHERE id = ?", rewarded.trajectory)
        start = rows[0][0] if rows and rows[0][0] else report.at
    name = f"t{format_id(rewarded.trajectory)}"
    lane = Lane(report.worker, "reward")
    return Overlapping(
        lane, name, "reward", min(start, report.at), report.at, {"trajectory": name, "reward": rewarded.reward}
    )


def _instant(event: AnyEvent) -> Instant:
    fields = {
        key: value
        for key, value in msgspec.to_builtins(event).items()
        if key not in ("seq", "at", "type", "data_state")
    }
    worker = getattr(event, "worker", None)
    return Instant(
        Lane(str(worker or CONTROLLER), "events"), type(event).__name__, event.at, {"seq": event.seq, **fields}
    )


def _events(recording: Recording, window: Window) -> Iterator[AnyEvent]:
    """What cannot be decoded (it is damaged, or of another Laminar) is left out: `laminar.replay --verify` says so."""
    for boot, first, last in _places(recording, window):
        for at in range(first, last, EVENTS_AT_ONCE):
            query = "SELECT body FROM events WHERE boot = ? AND seq >= ? AND seq < ? ORDER BY seq"
            for (body,) in recording.query(query, boot, at, min(at + EVENTS_AT_ONCE, last)):
                with contextlib.suppress(msgspec.MsgspecError):
                    yield msgspec.msgpack.decode(body, type=AnyEvent)


def _places(recording: Recording, window: Window) -> list[tuple[int, int, int]]:
    """(boot, its first event of the window, its first one after it)."""
    boots = [boot.number for life in recording.lives for boot in life.boots]
    places = [(boot, *(_first_after(recording, boot, at) for at in window)) for boot in boots]
    return [(boot, first, last) for boot, first, last in places if first < last]


def _first_after(recording: Recording, boot: int, at: float) -> int:
    """The seq of the first event after that time; times only grow, and there is no index of them."""
    low, high = recording.query("SELECT min(seq), max(seq) + 1 FROM events WHERE boot = ?", boot)[0]
    if low is None:
        return 0
    while low < high:
        middle = (low + high) // 2
        (found,) = recording.query(
            "SELECT at FROM events WHERE boot = ? AND seq >= ? ORDER BY seq LIMIT 1", boot, middle
        )[0]
        if found > at:
            high = middle
        else:
            low = middle + 1
    return int(low)
