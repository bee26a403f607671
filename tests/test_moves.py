"""The table `moves` against what the core says of its moves."""

import contextlib
import sqlite3
from pathlib import Path

import pytest

from laminar.controller import moves
from laminar.controller.moves import Moves
from laminar.core import actions
from laminar.ids import format_id
from tests.recorded_world import EVENTFUL, RecordedWorld, eventful, recorded

pytestmark = pytest.mark.timeout(60)


def rows(world: RecordedWorld) -> list[tuple]:
    with contextlib.closing(sqlite3.connect(world.directory / "run.db")) as database:
        return database.execute("SELECT * FROM moves ORDER BY rowid").fetchall()


async def test_every_move_that_the_core_counts_is_a_row_with_its_ends(tmp_path: Path) -> None:
    async with eventful(tmp_path) as world:
        counted, moved_tokens = world.core.state.repack.num_moves, world.core.state.repack.num_moved_tokens
        told = {row.text.partition(":")[0] for row in world.core.story._rows if "move from" in row.text}
    found = rows(world)
    assert len(found) == counted > 1
    assert sum(row[5] for row in found) == moved_tokens
    for trajectory, attempt, source, destination, version, num_tokens, start, end in found:
        assert (attempt > 1, num_tokens > 0, version[0], start < end) == (True, True, "v", True), format_id(trajectory)
        assert any(f"move from {source} to {destination}" in text for text in told)


async def test_what_ends_at_the_source_first_has_not_moved(tmp_path: Path) -> None:
    async with eventful(tmp_path) as world:
        aborted = [a for a in world.all(actions.AbortAttempts) for _ in a.trajectories]
        assert len(aborted) > world.core.state.repack.num_moves, "this seed lets something end at its source"
    assert len(rows(world)) == world.core.state.repack.num_moves


async def test_moves_that_nothing_ends_are_forgotten_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "UNDER_WAY_MAX", 3)
    async with recorded(tmp_path, EVENTFUL, seed=0) as world:
        table = Moves(world.runtime, world.log_file)
        for number in range(10):
            table._begin(number, moves._Begun("r0", float(number)))  # type: ignore[arg-type]
        assert list(table._under_way) == [7, 8, 9]
