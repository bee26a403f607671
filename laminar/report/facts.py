"""What a report tells of a run, read from its database and from the configuration beside it."""

import time
from typing import Any, NamedTuple

import msgspec

from laminar import configfile
from laminar.config import Config
from laminar.core.records import State
from laminar.errors import LaminarError
from laminar.replay.recording import Boot, Recording
from laminar.report import ending

ALIVE_S = 30.0  # a run whose last event is younger goes on: its replicas report several times a second, its timers now and then
SLOWEST = 20
ALARMS_SHOWN = 60
PIECES_MAX = 6000  # of all lanes together: some 700 KB of SVG
STALENESSES = ("s_gen", "residence", "s_train")


class Slow(NamedTuple):
    """A trajectory that took long. Times are run times, None = it did not come to that."""

    id: int
    group: int
    prompt: int
    attempt: int
    version: str | None
    num_prompt_tokens: int
    num_tokens: int
    reward: float | None
    finish_reason: str
    dropped: str | None
    step: int | None
    queued: float
    first_token: float | None
    finished: float | None
    rewarded: float


class Level(NamedTuple):
    """A row of the table `levels`."""

    at: float
    buffer_groups: int
    in_flight: int
    generating: int
    kv_tokens: int
    kv_tokens_max: int


class Piece(NamedTuple):
    """A row of the table `spans`."""

    worker: str
    start: float
    end: float
    what: str


class Worker(NamedTuple):
    """Sums of one replica."""

    name: str
    decode_s: float
    num_pulls: int
    pull_s: float
    num_out: int
    num_in: int


class Facts(msgspec.Struct, kw_only=True):
    """Everything. `note`: what could not be read, for people."""

    name: str
    boots: list[Boot]
    last_at: float
    """Of the last event, seconds since the epoch; 0 = there is none."""
    now: float
    state: State | None
    note: str
    config: Config | None
    config_note: str
    hosts: str
    metrics: dict[str, list[tuple[int, float]]]
    staleness: dict[str, list[tuple[int, int]]]
    levels: list[Level]
    pulls: list[Piece]
    trains: list[Piece]
    workers: list[Worker]
    alarms: list[tuple[float, str, str]]
    checkpoints: list[tuple[int, float | None]]
    slowest: list[Slow]
    finish_reasons: list[tuple[str, int]]
    num_gone: int
    """Trajectories whose records have left the database: `staleness`, `slowest` and `finish_reasons` are without them."""

    @property
    def began(self) -> float:
        return self.boots[0].started

    @property
    def ending(self) -> str:
        """How the run stands, in words."""
        outcome = self.boots[-1].outcome
        if outcome:
            return outcome
        if abs(self.now - self.last_at) < ALIVE_S:
            return "going on while this was written"
        return "ended without a word: killed, or its machine died"

    @property
    def wall_s(self) -> float:
        return max(0.0, self.last_at - self.began)

    def values(self, name: str) -> list[float]:
        """Of one metric, in order of steps."""
        return [value for _, value in self.metrics.get(name, ())]


def read(recording: Recording) -> Facts:
    """Raises RecordingError."""
    state, note = ending.state_of(recording)
    config, config_note = _config(recording)
    boots = [boot for life in recording.lives for boot in life.boots]
    pulls = _spans(recording, "pull", PIECES_MAX)
    return Facts(
        name=recording.path.parent.name, boots=boots, last_at=_last_at(recording), now=time.time(), state=state, note=note,
        config=config, config_note=config_note, hosts=_file(recording, "hosts.txt"),
        metrics=_metrics(recording), staleness={name: _staleness(recording, name) for name in STALENESSES},
        levels=[Level._make(row) for row in _rows_if_there(recording, "levels", "SELECT * FROM levels ORDER BY at")],
        pulls=pulls, trains=_spans(recording, "train", PIECES_MAX), workers=_workers(recording),
        alarms=recording.query("SELECT at, name, text FROM alarms ORDER BY at"),
        checkpoints=recording.query("SELECT step, saved_at FROM checkpoints ORDER BY step"),
        slowest=_slowest(recording),
        num_gone=sum(row[1] for row in _rows_if_there(recording, "gone", "SELECT what, num FROM gone")),
        finish_reasons=recording.query(
            "SELECT coalesce(nullif(finish_reason, ''), 'none'), count(*) FROM trajectories GROUP BY 1 ORDER BY 2 DESC"
        ),
    )  # fmt: skip


def _config(recording: Recording) -> tuple[Config | None, str]:
    try:
        return configfile.load(recording.path.parent / "config.toml", []), ""
    except LaminarError as error:
        return None, str(error)


def _file(recording: Recording, name: str) -> str:
    try:
        return (recording.path.parent / name).read_text(errors="replace")
    except OSError:
        return ""


def _last_at(recording: Recording) -> float:
    place = recording.last(recording.life())
    rows = recording.query("SELECT at FROM events WHERE (boot, seq) = (?, ?)", *place)
    return float(rows[0][0]) if rows else 0.0


def _metrics(recording: Recording) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for step, name, value in recording.query("SELECT step, name, value FROM metrics ORDER BY step"):
        if value is not None:
            found.setdefault(name, []).append((step, value))
    return found


def _staleness(recording: Recording, name: str) -> list[tuple[int, int]]:
    query = f"SELECT {name}, count(*) FROM trajectories WHERE trained_at IS NOT NULL AND {name} IS NOT NULL GROUP BY 1 ORDER BY 1"
    return recording.query(query)


def _spans(recording: Recording, kind: str, most: int) -> list[Piece]:
    """The last ones, oldest first."""
    query = "SELECT worker, start, end, version FROM spans WHERE kind = ? ORDER BY end DESC LIMIT ?"
    return [Piece._make(row) for row in reversed(recording.query(query, kind, most))]


def _workers(recording: Recording) -> list[Worker]:
    sums = "SELECT worker, kind, count(*), sum(busy_s) FROM spans WHERE kind IN ('decode', 'pull') GROUP BY 1, 2"
    spans = {(worker, kind): (num, seconds) for worker, kind, num, seconds in recording.query(sums)}
    moves = {
        column: dict(_rows_if_there(recording, "moves", f"SELECT {column}, count(*) FROM moves GROUP BY 1"))
        for column in ("source", "destination")
    }
    found = []
    for name in sorted({worker for worker, _ in spans}, key=natural):
        decode_s, pulls = spans.get((name, "decode"), (0, 0.0))[1], spans.get((name, "pull"), (0, 0.0))
        found.append(Worker(name, decode_s, *pulls, moves["source"].get(name, 0), moves["destination"].get(name, 0)))
    return found


def _slowest(recording: Recording) -> list[Slow]:
    columns = (
        "id, group_id, prompt, attempt, behavior_version, num_prompt_tokens, num_tokens, reward, finish_reason, dropped, step, "
        "queued_at, first_token_at, finished_at, rewarded_at"
    )
    where = "queued_at IS NOT NULL AND rewarded_at IS NOT NULL ORDER BY rewarded_at - queued_at DESC LIMIT ?"
    return [Slow._make(row) for row in recording.query(f"SELECT {columns} FROM trajectories WHERE {where}", SLOWEST)]


def _rows_if_there(recording: Recording, table: str, query: str) -> list[tuple[Any, ...]]:
    """Rows of a table that older runs do not have."""
    there = recording.query("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", table)
    return recording.query(query) if there else []


def natural(name: str) -> list[tuple[int, str]]:
    """`rollout-2` before `rollout-10`."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in name.replace("/", "-").split("-")]
