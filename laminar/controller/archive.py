"""The tokens of what was trained, kept in Parquet: `archive/steps-<first>-<last>-<id>.parquet` (`log.archive`, docs/storage.md).

    ForgetTokens of a committed step ─► Archive.add ─► a file, in another thread ─► TokenStore.forget

A file holds whole train steps, a row per trajectory, siblings together. Its metadata name the first trajectory of each step, by
which a controller that takes over knows what is there; <id> is that of the first step: the same steps get the same name again.

Invariants:
* A file is there whole or not at all: it is renamed when it is on disk. Tokens are forgotten only after that.
* Every trajectory that a checkpoint has committed is in exactly one file, also if the controller was killed in between
  (`adopt`). Steps that were undone later stay; their trajectories have a reason in `dropped` of run.db.
"""

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laminar import wire
from laminar.checkpoints import sync
from laminar.controller.segments import Past
from laminar.controller.tokens import TokenStore
from laminar.controller.upkeep import FOREVER
from laminar.core.records import State, Trajectory, TrajectoryState
from laminar.errors import ConfigError
from laminar.ids import GroupId, PromptId, TrajectoryId

ROW_GROUP_TOKENS = 4 << 20  # some 40 MiB: what is in memory twice, and what a reader takes at a time
FILE_TOKENS = 64 << 20  # some 600 MiB: a file ends with the step that reaches this
RETRY_S = 1.0  # a full disk is looked at so often
CLOSE_S = 300.0  # for the last files on a slow disk; one that hangs must not hold up the end for ever
FROM_TABLE = {
    "trajectory_id": "id", "prompt_id": "prompt", "group_id": "group_id", "sibling": "sibling", "attempt": "attempt",
    "step": "step", "behavior_version": "behavior_version", "finish_version": "finish_version",
    "sample_version": "sample_version", "weight_digest": "digest", "finish_reason": "finish_reason", "reward": "reward",
    "reward_parts": "reward_parts", "s_gen": "s_gen", "residence": "residence", "s_train": "s_train",
    "queued_at": "queued_at", "first_token_at": "first_token_at", "finished_at": "finished_at",
    "rewarded_at": "rewarded_at", "sampled_at": "sampled_at", "trained_at": "trained_at",
}  # fmt: skip
"""Column -> that of the table `trajectories`. Times are seconds since the epoch. The arrays come after them: `ARRAYS`."""
ARRAYS = {
    "prompt_tokens": "int32",
    "response_tokens": "int32",
    "behavior_logprobs": "float32",
    "sources": "uint8",
}
"""Per token; `sources`: 0 = the model's, else the environment's, which are masked from the loss."""
_STEPS = b"laminar.steps"
_NAME = re.compile(r"steps-(\d+)-(\d+)-[0-9a-f]+\.parquet")
_ROWS = "FROM trajectories WHERE step = ? AND trained_at IS NOT NULL AND dropped IS NULL"


def require() -> None:
    """Raises ConfigError, with what to type, if Parquet cannot be written here. Imports pyarrow, which takes some 0.3 s."""
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f'log.archive = "parquet" needs pyarrow, which cannot be imported ({error}); '
            "install it with `pip install 'laminar-rl[archive]'`"
        ) from error


class Batch(NamedTuple):
    """Committed trajectories of one train step."""

    step: int
    trajectories: list[TrajectoryId]


class Archive:
    """`archive/` of one run. Called from the event loop.

    `on_stalled` hears why nothing can be written, whatever that is, and None when it could.
    """

    def __init__(
        self,
        directory: Path,
        database: Path,
        tokens: TokenStore,
        on_stalled: Callable[[str | None], None],
        *,
        wanted: bool = True,
    ) -> None:
        """Not `wanted`: what is added is forgotten."""
        if wanted:
            directory.mkdir(exist_ok=True)
        for torn in directory.glob("*.tmp"):
            torn.unlink()
        self._wanted = wanted
        self._directory, self._database, self._tokens, self._on_stalled = directory, database, tokens, on_stalled
        self._waiting: list[Batch] = []
        self._writer: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def add(self, step: int, trajectories: Sequence[TrajectoryId]) -> None:
        """A checkpoint has committed them. They are on disk in run.db, and held by the token store; both are read later."""
        if not self._wanted:
            self._tokens.forget(trajectories)
            return
        self._waiting.append(Batch(step, list(trajectories)))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write_all(), name="archive")

    def first_step_needed(self) -> int:
        """The first whose records in run.db it has yet to read. From any thread."""
        return min([batch.step for batch in list(self._waiting)], default=FOREVER)

    def adopt(self, past: Past, state: State) -> str:
        """Let the token store hold what earlier boots wrote and is still needed, and archive what the archive lacks.

        Words for people, if some of that is lost. Raises StartError if tokens are lost that the run itself needs.
        """
        trained = self._unfinished(state.trainer.checkpoint, past) if self._wanted else []
        held = set(self._tokens.adopt(past, state.trajectories.values(), trained))
        for step, records in itertools.groupby(trained, key=lambda record: record.step):
            if ids := [record.id for record in records if record.id in held]:
                self.add(step, ids)
        lost = len(trained) - len(held)
        return (
            f"{lost} trained trajectories are not in the archive: the token segments lack their tokens" if lost else ""
        )

    def _unfinished(self, committed: int, past: Past) -> list[Trajectory]:
        """Trained trajectories that a checkpoint has committed, of which the segments have tokens and no file has a row.

        Down from step `committed` to the first that is there: steps are archived in their order.
        """
        found = []
        columns = "id, group_id, prompt, sibling, attempt, num_tokens, num_prompt_tokens, step"
        with contextlib.closing(sqlite3.connect(self._database)) as connection:
            for step in range(committed, 0, -1):
                rows = connection.execute(f"SELECT {columns} {_ROWS} ORDER BY id", (step,)).fetchall()
                if not any(past.knows(row[0]) for row in rows) or _has(self._directory, step, rows[0][0]):
                    break
                found.append([_record(*row) for row in rows])
        return [record for records in reversed(found) for record in records]

    async def finish(self) -> str:
        """When everything is written, or nothing can be. Words for people if something is not; its tokens are not forgotten."""
        self._closing.set()
        if self._writer is not None:
            done, _ = await asyncio.wait([self._writer], timeout=CLOSE_S)
            for writer in done:
                writer.result()
        if not self._waiting:
            return ""
        steps = ", ".join(str(batch.step) for batch in self._waiting)
        return f"not in the archive yet: steps {steps}; their tokens are kept, --resume archives them"

    async def _write_all(self) -> None:
        stalled = False
        while self._waiting:
            try:
                batches = self._next_file()
                await asyncio.to_thread(self._write, batches)
            except Exception as error:  # noqa: BLE001 - also what pyarrow or the table may raise: the run waits, no token is lost
                if not stalled:
                    self._on_stalled(f"{self._directory}: {_in_words(error)}")
                stalled = True
                if self._closing.is_set():
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), RETRY_S)
                continue
            if stalled:
                self._on_stalled(None)
            stalled = False
            del self._waiting[: len(batches)]
            self._tokens.forget([trajectory for batch in batches for trajectory in batch.trajectories])

    def _next_file(self) -> list[Batch]:
        """Steps up to FILE_TOKENS, in order."""
        batches, num_tokens = list[Batch](), 0
        for batch in self._waiting:
            if num_tokens >= FILE_TOKENS:
                break
            batches.append(batch)
            num_tokens += self._tokens.num_tokens(batch.trajectories)
        return batches

    def _write(self, batches: list[Batch]) -> None:
        """One file. In another thread."""
        firsts = {batch.step: min(batch.trajectories) for batch in batches}
        name = f"steps-{batches[0].step:06d}-{batches[-1].step:06d}-{firsts[batches[0].step]:x}.parquet"
        path = self._directory / name
        torn = path.with_suffix(".tmp")
        try:
            _write_file(torn, firsts, self._rows(batches))
            sync(torn)
            os.replace(torn, path)
            sync(self._directory)
        except BaseException:
            torn.unlink(missing_ok=True)
            raise

    def _rows(self, batches: list[Batch]) -> Iterator[tuple[dict[str, Any], wire.TokenRow]]:
        """What the table and the store have of each trajectory, siblings together."""
        with contextlib.closing(sqlite3.connect(f"{self._database.as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            for batch in batches:
                wanted = set(batch.trajectories)
                for row in database.execute(f"SELECT * {_ROWS} ORDER BY group_id, sibling", (batch.step,)).fetchall():
                    if row["id"] in wanted:
                        (tokens,) = self._tokens.rows([row["id"]])
                        yield {name: row[column] for name, column in FROM_TABLE.items()}, tokens


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError | sqlite3.Error):  # the latter, too, where a process has no file descriptor left
        return getattr(error, "strerror", None) or str(error)
    return f"{type(error).__name__}: {error}"


# ---- after a controller that was killed ---------------------------------------------------------------------


def _record(
    number: int, group: int, prompt: int, sibling: int, attempt: int, num_tokens: int, num_prompt: int, step: int
) -> Trajectory:
    """As far as the token store needs it."""
    return Trajectory(
        id=TrajectoryId(number), group=GroupId(group), prompt=PromptId(prompt), sibling=sibling, seed=0, attempt=attempt,
        state=TrajectoryState.DONE, num_tokens=num_tokens, num_prompt_tokens=num_prompt, step=step,
    )  # fmt: skip


def _has(directory: Path, step: int, first: int) -> bool:
    """Whether the step whose first trajectory this is is in a file."""
    import pyarrow
    from pyarrow import parquet

    for path in directory.glob("steps-*.parquet"):
        name = _NAME.fullmatch(path.name)
        if name and int(name[1]) <= step <= int(name[2]):
            with contextlib.suppress(OSError, pyarrow.ArrowException):  # a file that cannot be read has nothing
                if json.loads(parquet.read_metadata(path).metadata[_STEPS]).get(str(step)) == first:
                    return True
    return False


# ---- Parquet -----------------------------------------------------------------------------------------------


def _write_file(
    path: Path, firsts: dict[int, TrajectoryId], rows: Iterator[tuple[dict[str, Any], wire.TokenRow]]
) -> None:
    from pyarrow import parquet

    schema = _schema().with_metadata({_STEPS: json.dumps(firsts).encode()})
    with parquet.ParquetWriter(
        path, schema, compression="zstd", use_dictionary=["finish_reason", "weight_digest"]
    ) as file:
        group, num_tokens = [], 0
        for row in rows:
            group.append(row)
            num_tokens += len(row[1].tokens) // 4
            if num_tokens >= ROW_GROUP_TOKENS:
                file.write_table(_table(group, schema))
                group, num_tokens = [], 0
        if group:
            file.write_table(_table(group, schema))


def _schema() -> Any:
    import pyarrow as pa

    types = {"reward": pa.float64(), "reward_parts": pa.map_(pa.string(), pa.float64())}
    types |= dict.fromkeys(("trajectory_id", "prompt_id", "group_id"), pa.int64())
    types |= dict.fromkeys(("sibling", "attempt", "step", "s_gen", "residence", "s_train"), pa.int32())
    columns = [(name, types.get(name, pa.float64() if name.endswith("_at") else pa.string())) for name in FROM_TABLE]
    return pa.schema([*columns, *((name, pa.list_(pa.type_for_alias(kind))) for name, kind in ARRAYS.items())])


def _table(rows: list[tuple[dict[str, Any], wire.TokenRow]], schema: Any) -> Any:
    import pyarrow as pa

    columns = {name: [of_table[name] for of_table, _ in rows] for name in FROM_TABLE}
    columns["reward_parts"] = [list(json.loads(parts or "{}").items()) for parts in columns["reward_parts"]]
    arrays = [pa.array(values, schema.field(name).type) for name, values in columns.items()]
    parts = (
        [row.prompt_tokens for _, row in rows],
        [row.tokens for _, row in rows],
        [row.logprobs for _, row in rows],
        [row.sources or bytes(len(row.tokens) // 4) for _, row in rows],
    )
    arrays += [_lists(values, kind) for values, kind in zip(parts, ARRAYS.values(), strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _lists(values: list[bytes], kind: str) -> Any:
    """A list column of little-endian numbers."""
    import pyarrow as pa

    of = pa.type_for_alias(kind)
    width, ends = of.bit_width // 8, [0]
    for value in values:
        ends.append(ends[-1] + len(value) // width)
    numbers = pa.Array.from_buffers(of, ends[-1], [None, pa.py_buffer(b"".join(values))])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), numbers)
