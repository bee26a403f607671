"""One replica, group or trajectory, looked at through a page: live ones, recorded ones, forgotten tokens, wrong names."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from web_world import MODEL, TOKEN, World, served

from laminar import wire
from laminar.controller.schema import prepare
from laminar.controller.web.detail import NO_TOKEN, NOT_HELD, TOKENS_SHOWN
from laminar.controller.web.lanes import Activity
from laminar.controller.web.records import Records
from laminar.controller.web.text import WAITING_MAX, Pieces, of_prompt
from laminar.core import events
from laminar.ids import GroupId, TrajectoryId, WorkerId, format_id, make_id

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with served(World(tmp_path)) as world:
        world.start("r0")
        yield world


async def ask(world: World, path: str) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        aiohttp.ClientSession(world.url, headers=headers) as session,
        session.get(f"/v1/dashboard/{path}") as answer,
    ):
        return answer.status, await answer.json()


def first_group(world: World) -> tuple[GroupId, list[TrajectoryId]]:
    group = next(iter(world.core.state.groups.values()))
    return group.id, group.trajectories


async def test_a_replica_is_explained_in_the_words_of_the_core_and_says_what_it_has(world: World) -> None:
    status, told = await ask(world, "replica/r0")
    assert status == 200
    assert [t["id"] for t in told["trajectories"]] == [f"t{format_id(t)}" for t in world.generating("r0")]
    assert told["why"]["text"]
    assert ("holds" in dict(told["why"]["lines"])) or told["why"]["lines"]
    assert any("holds v0" in row["text"] for row in told["story"])
    assert (await ask(world, "replica/nobody"))[0] == 404


async def test_the_text_of_a_trajectory_comes_token_by_token_with_what_each_was_worth(world: World) -> None:
    group, (one, *_) = first_group(world)
    world.write(group, [5, 6], {one: [7, 8, 1]}, logprob=-0.25)
    status, told = await ask(world, f"trajectory/t{format_id(one)}")
    assert (status, told["prompt_text"]) == (200, "cd")
    assert told["tokens"] == [[7, "e", -0.25, 0], [8, "f", -0.25, 0], [1, "<eos>", -0.25, 0]]
    assert (told["group"], told["live"], told["reward"]) == (f"g{format_id(group)}", True, None)
    assert told["timings"]["queued"] == world.core.state.trajectories[one].timings.queued > 0


async def test_a_long_text_comes_in_parts(world: World) -> None:
    group, (one, *_) = first_group(world)
    world.write(group, [5], {one: [7] * (TOKENS_SHOWN + 3)})
    _, first = await ask(world, f"trajectory/t{format_id(one)}")
    _, rest = await ask(world, f"trajectory/t{format_id(one)}?from={TOKENS_SHOWN}")
    assert (len(first["tokens"]), len(rest["tokens"]), rest["first"]) == (TOKENS_SHOWN, 3, TOKENS_SHOWN)


async def test_a_trajectory_without_tokens_says_why_and_shows_the_prompt_of_the_data_set(world: World) -> None:
    _, (one, *_) = first_group(world)
    _, told = await ask(world, f"trajectory/t{format_id(one)}")
    assert (told["tokens"], told["why_no_tokens"]) == (None, NO_TOKEN)
    assert told["prompt_text"].startswith("spell: abc #")


async def test_a_group_shows_its_siblings_prompt_and_rewards(world: World) -> None:
    group, members = first_group(world)
    world.complete_all("r0", reward=0.75)
    status, told = await ask(world, f"group/g{format_id(group)}")
    assert (status, told["answer"], told["worker"]) == (200, "cba", "r0")
    assert [(t["id"], t["reward"]) for t in told["trajectories"]] == [(f"t{format_id(t)}", 0.75) for t in members]


async def test_what_has_left_the_core_is_read_from_the_database_and_its_tokens_are_said_to_be_forgotten(
    world: World, tmp_path: Path
) -> None:
    database = sqlite3.connect(tmp_path / "run.db")
    for number in range(2):
        values = (make_id(7, 30 + number), 3, make_id(7, 9), number, 1, "v0", "v0", "v1", "d", 5, 8, 0.5, '{"correct": 1.0}',
                  "stop", 4, None, 0, 1, 1, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0)  # fmt: skip
        database.execute(f"INSERT INTO trajectories VALUES ({', '.join('?' * 25)})", values)
    database.commit()
    database.close()
    status, told = await ask(world, "trajectory/t7.30")
    assert (status, told["live"], told["why_no_tokens"], told["s_train"]) == (200, False, NOT_HELD, 1)
    assert told["why"]["text"] == "trained in step 4, and committed"
    assert told["reward_parts"] == {"correct": 1.0}
    status, told = await ask(world, "group/g7.9")
    assert [t["id"] for t in told["trajectories"]] == ["t7.30", "t7.31"]
    for path in (
        "group/g7.8", "group/g9999999999999999.1", "trajectory/t7.9999999999999999", "trajectory/t7.32", "trajectory/g7.9",
        "trajectory/t7", "group/%3Cscript%3E",
    ):  # fmt: skip
        assert (await ask(world, path))[0] == 404, path
    assert (await ask(world, "trajectory/t7.32"))[1]["error"] == "there is no trajectory t7.32"
    with contextlib.closing(sqlite3.connect(tmp_path / "run.db")) as gone, gone:
        gone.execute("INSERT INTO gone VALUES ('trajectories', 2500)")
    for path, what in (("group/g7.8", "group g7.8"), ("trajectory/t7.32", "trajectory t7.32")):
        error = (await ask(world, path))[1]["error"]
        assert error == f"there is no {what}, or its record is one of 2,500 that have left the log (log.max_mib)"


def test_siblings_are_found_among_many_groups(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "run.db")
    prepare(database)
    for number in range(1, 400):
        row = [make_id(2, number), 0, make_id(2, number // 4), *[None] * 22]
        database.execute(f"INSERT INTO trajectories VALUES ({', '.join('?' * 25)})", row)
    database.commit()
    database.close()
    records = Records(tmp_path / "run.db")
    for group in (0, 1, 50, 99):
        found = [row["id"] for row in records.siblings(make_id(2, group))]
        assert found == [make_id(2, n) for n in range(max(1, 4 * group), 4 * group + 4)]
    assert records.siblings(make_id(2, 100)) == records.siblings(make_id(3, 1)) == []


def test_the_steps_of_earlier_processes_come_evenly_and_bounded(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "run.db")
    prepare(database)
    rows = [(step, name, float(step)) for step in range(1, 101) for name in ("reward/mean", "other")]
    database.executemany("INSERT INTO metrics VALUES (?, ?, ?)", rows)
    database.commit()
    database.close()
    records = Records(tmp_path / "run.db")
    assert records.steps(("reward/mean", "x"), 4, 50) == [(1, [1.0, None]), (2, [2.0, None]), (3, [3.0, None])]
    assert [step for step, _ in records.steps(("reward/mean",), 101, 10)] == [11, 22, 33, 44, 55, 66, 77, 88, 99]


def test_without_a_tokenizer_there_are_ids_and_the_reason(tmp_path: Path) -> None:
    pieces = Pieces(str(tmp_path))
    assert pieces.of([5, 6]) == ["5 ", "6 "]
    assert "tokenizer.json on the controller's machine" in pieces.why_not
    (tmp_path / "tokenizer.json").write_text("{")
    broken = Pieces(str(tmp_path))
    assert broken.of([5]) == ["5 "]
    assert "cannot be read" in broken.why_not
    assert Pieces(str(MODEL)).of([5, 10_000, 6])[::2] == ["c", "d"]


def test_chat_messages_are_shown_with_their_roles() -> None:
    prompt = wire.Prompt(prompt=0, messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])  # type: ignore[arg-type]
    assert of_prompt(prompt) == "[user]\nhi\n\n[assistant]\nho"


async def test_readers_take_turns(world: World) -> None:
    group, members = first_group(world)
    world.write(group, [5], {members[0]: [7] * 50})
    answers = await asyncio.gather(*(ask(world, f"trajectory/t{format_id(members[0])}") for _ in range(6)))
    assert {status for status, _ in answers} == {200}
    assert world.core.state.replicas[WorkerId("r0")].num_generating


def test_lanes_of_earlier_times_are_read_from_the_spans_and_moves_of_the_database(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "run.db")
    prepare(database)
    for tick in range(400):  # a report a second; r0 pulls v1 at 200 s, r1 never does
        version = "v0" if tick < 200 else "v1"
        database.execute(
            "INSERT INTO spans VALUES ('r0', 'decode', ?, ?, 1.0, ?)", (1000.0 + tick, 1001.0 + tick, version)
        )
        database.execute("INSERT INTO spans VALUES ('r1', 'decode', ?, ?, 1.0, 'v0')", (1000.0 + tick, 1001.0 + tick))
        if tick == 200:
            database.execute("INSERT INTO spans VALUES ('r0', 'pull', 1200.0, 1200.5, 0.5, 'v1')")
            database.execute("INSERT INTO spans VALUES ('trainer-0/0', 'train', 1190.0, 1200.5, 9.0, 's1')")
    for trajectory in (1, 2, 3):
        at = 1250.0 if trajectory < 3 else 1350.0
        database.execute("INSERT INTO moves VALUES (?, 2, 'r1', 'r0', 'v0', 9, ?, ?)", (trajectory, at, at + 1))
    database.commit()
    database.close()
    records = Records(tmp_path / "run.db")
    lanes = records.lanes(1100.0, 1300.0)
    assert sorted(lanes) == ["r0", "r1"]
    generating, pulling = int(Activity.GENERATING), int(Activity.SYNCING)
    found = {(kind, version) for _, _, kind, version in lanes["r0"]}
    assert found == {(generating, "v0"), (pulling, "v1"), (generating, "v1")}
    assert len(lanes["r0"]) < 6
    ((begin, end, kind, version),) = lanes["r1"]
    assert (kind, version) == (generating, "v0")
    assert begin <= 1100.0
    assert 1299.0 <= end <= 1302.0
    assert records.moves(1100.0, 1300.0) == [(1250.0, "r1", "r0", 2)]
    assert records.trains(1100.0, 1300.0) == [(1190.0, 1200.5, "s1")]
    assert records.trains(1100.0, 1150.0) == []
    assert records.lanes(5000.0, 5001.0) == records.lanes(1.0, 2.0) == {}


async def test_earlier_lanes_want_a_time(world: World) -> None:
    assert (await ask(world, "lanes?from=10&to=20"))[0] == 200
    for query in ("", "?from=1", "?from=x&to=2", "?from=2&to=1", "?from=0&to=1e9", "?from=nan&to=nan"):
        assert (await ask(world, f"lanes{query}"))[0] == 400, query


# ---- text --------------------------------------------------------------------------------------------------


def by_bytes(directory: Path) -> Pieces:
    """Of a model that has a token for each byte, and no other: how bytes become tokens when nothing is merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    return Pieces(str(directory))


def tokens_of(directory: Path, text: str) -> list[int]:
    return Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids


def test_a_character_of_several_tokens_comes_with_its_last_one_also_where_a_part_of_a_text_begins(
    tmp_path: Path,
) -> None:
    pieces = by_bytes(tmp_path)
    tokens = tokens_of(tmp_path, "é😀b")
    assert pieces.of(tokens) == ["", "é", "", "", "", "😀", "b"]
    for first in range(len(tokens)):
        assert pieces.of(tokens, first) == pieces.of(tokens)[first:], first
        assert pieces.of(tokens, 0, first) == pieces.of(tokens)[:first], first


def test_bytes_that_are_no_character_are_shown_as_such_and_near_where_they_are(tmp_path: Path) -> None:
    pieces = by_bytes(tmp_path)
    smile, good = tokens_of(tmp_path, "😀"), tokens_of(tmp_path, "good")
    cut = pieces.of([*good, *smile[:3]])
    assert "".join(cut).startswith("good")
    assert cut[-1] == "\ufffd"
    garbage = smile[1:2] * 100
    told = pieces.of([*garbage, *good])
    assert "".join(told).strip("\ufffd") == "good"
    assert "".join(told).count("\ufffd") == 100
    assert told.index("\ufffd" * WAITING_MAX) < WAITING_MAX


async def test_a_long_prompt_is_shown_from_its_end_and_says_how_much_is_left_out(world: World) -> None:
    group, (one, *_) = first_group(world)
    world.write(group, [5] * 7 + [6] * TOKENS_SHOWN, {one: [7]})
    _, told = await ask(world, f"trajectory/t{format_id(one)}")
    assert (told["prompt_left_out"], told["prompt_text"]) == (7, "d" * TOKENS_SHOWN)


async def test_a_replica_that_has_left_still_has_its_story(world: World) -> None:
    world.join("r1")
    world.refreshed("r1")
    world.send(events.DrainRequested(worker=WorkerId("r1")))
    while "r1" in world.core.state.replicas:
        world.complete_all("r1")
        world.lost("r1")
    status, told = await ask(world, "replica/r1")
    assert (status, told["live"], told["why"]["text"]) == (200, False, "r1 has left the run")
    assert any("holds v0" in row["text"] for row in told["story"])
