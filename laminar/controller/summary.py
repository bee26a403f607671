"""The last screen of a run, read back from `run.db`: what came out, whether the books balance, where to look next."""

import contextlib
import shlex
import sqlite3
import sys
from pathlib import Path

from laminar import checkpoints
from laminar.controller.schema import num_gone
from laminar.core.ledger import is_closed
from laminar.core.records import Account, State

NUM_STEPS = 3  # rewards of single steps are noisy; the first and last few say more


def summarize(run: Path, state: State, elapsed_s: float) -> str:
    """Many lines for people; without the database's if it cannot be read."""
    uri = f"{(run / 'run.db').absolute().as_uri()}?mode=rw"  # the last one to close removes the write-ahead log
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            lines = [
                *_outcome(database, state), *_speed(database, elapsed_s), *_staleness(database), *_dropped(database)
            ]  # fmt: skip
    except sqlite3.Error as error:
        lines = [f"{run / 'run.db'} cannot be read: {error}"]
    return "\n".join([*lines, *_repack(state), *_failovers(state), *_ledger(state), *_next_steps(run, state)])


def _series(database: sqlite3.Connection, name: str) -> list[float]:
    return [row[0] for row in database.execute("SELECT value FROM metrics WHERE name = ? ORDER BY step", (name,))]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _outcome(database: sqlite3.Connection, state: State) -> list[str]:
    rewards = _series(database, "reward/mean")
    ending = (state.finished or "not finished") if state.ok else "failed"
    lines = [f"run {ending} at step {state.trainer.step}"]
    if rewards:
        first, last = _mean(rewards[:NUM_STEPS]), _mean(rewards[-NUM_STEPS:])
        lines.append(
            f"reward             {first:.3f} → {last:.3f}  (mean of the first and last {NUM_STEPS} of {len(rewards)} steps)"
        )
    done = {evaluation.name: evaluation for evaluation in state.evaluations if evaluation.num_prompts}
    if "before" in done:
        before, after = done["before"], done.get("after")
        for name, key in (("greedy accuracy", "accuracy"), ("greedy reward", "score")):
            then = f"{getattr(after, key):.3f}" if after else "–"
            lines.append(f"{name:<18} {getattr(before, key):.3f} → {then}  (on {before.num_prompts} held-out prompts)")
    return lines


def _speed(database: sqlite3.Connection, elapsed_s: float) -> list[str]:
    walls = _series(database, "timing/wall_s")
    if not walls:
        return []
    generated, trained = (_series(database, f"perf/{kind}_tokens_per_s") for kind in ("generation", "training"))
    return [
        f"generation         {_mean(generated):,.0f} tokens/s, training {_mean(trained):,.0f} tokens/s,"
        f" {_mean(walls[1:] or walls):.2f} s per step",
        f"idle               trainer {_mean(_series(database, 'perf/trainer_idle_ratio')):.0%},"
        f" rollouts {_mean(_series(database, 'perf/rollout_idle_ratio')):.0%};"
        f" publication stall {1e3 * _mean(_series(database, 'perf/publication_stall_s')):.1f} ms per step,"
        f" weight pull {1e3 * _mean(_series(database, 'perf/rollout_wait_s')):.1f} ms",
        f"wall time          {elapsed_s:.0f} s, start of the workers included",
    ]


def _staleness(database: sqlite3.Connection) -> list[str]:
    lines = []
    for name in ("s_gen", "residence", "s_train"):
        rows = database.execute(
            f"SELECT {name}, count(*) FROM trajectories WHERE trained_at IS NOT NULL GROUP BY {name} ORDER BY {name}"
        ).fetchall()
        lines.append(f"  {name:<16} " + "  ".join(f"{steps}: {count}" for steps, count in rows))
        if not rows:
            return []
    left_out = (
        f", without {gone} older ones, whose records have left (log.max_mib)" if (gone := num_gone(database)) else ""
    )
    return [f"staleness          trained trajectories by trainer steps behind{left_out}", *lines]


def _dropped(database: sqlite3.Connection) -> list[str]:
    statement = "SELECT name, count(*), text, max(at) FROM alarms WHERE name != 'run-failed' GROUP BY name"
    alarms = database.execute(statement).fetchall()
    return [f"alarm              {name} × {count}: {text.splitlines()[0]}" for name, count, text, _ in alarms]


def _repack(state: State) -> list[str]:
    repack = state.repack
    if not repack.num_checks:
        return []
    return [
        f"repack             {repack.num_moves} moves from {repack.num_released} emptied replicas in {repack.num_checks} checks,"
        f" {repack.num_moved_tokens} response tokens prefilled again"
    ]


def _failovers(state: State) -> list[str]:
    counts = state.num_failovers
    ways = [
        (counts.same_version, "on another replica of their version"),
        (counts.relay, "under their version pulled from the relay"),
        (counts.checkpoint, "under their version loaded from a checkpoint"),
        (counts.restarted, "from the beginning"),
    ]
    told = ", ".join(f"{num} {how}" for num, how in ways if num)
    return [f"lost replicas      their trajectories went on: {told}"] if told else []


def _ledger(state: State) -> list[str]:
    rows = [("trajectories", "drawn", state.ledger.trajectories), ("tokens", "received", state.ledger.tokens)]
    return [_ledger_line(*row) for row in rows]


def _ledger_line(name: str, verb: str, account: Account) -> str:
    places = {key: getattr(account, key) for key in ("committed", "leased", "buffered", "in_flight")}
    dropped = "".join(f" + {amount} dropped ({reason})" for reason, amount in account.dropped.items())
    parts = " + ".join(
        f"{amount} {key.replace('_', ' ')}" for key, amount in places.items() if amount or key == "committed"
    )
    verdict = "closed" if is_closed(account) else "NOT CLOSED"
    return f"ledger, {name:<12} {account.total} {verb} = {parts}{dropped}  [{verdict}]"


def _next_steps(run: Path, state: State) -> list[str]:
    path = _typed(run)
    more = f" run.steps={2 * state.trainer.step}" if state.finished == "completed" else ""
    resume = f"{_typed(Path(sys.executable))} -m laminar.controller --resume {path}{more}"
    if not checkpoints.complete(run / "checkpoints"):
        resume = "not possible: the run ended before its first checkpoint"
    lines = [f"run directory      {path}", f"resume             {resume}"]
    if not state.trainer.step:
        return lines
    return [
        *lines,
        f"look               {_typed(Path(sys.executable))} scripts/asynchrony.py {path}",
        f"                   sqlite3 {path}/run.db 'SELECT step, value FROM metrics WHERE name = \"reward/mean\"'",
    ]


def _typed(path: Path) -> str:
    """As it can be typed here."""
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
