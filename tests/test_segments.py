"""What the token segments of earlier boots give back."""

from pathlib import Path

import pytest

from laminar import wire
from laminar.controller.segments import Entry, Past, encode
from laminar.controller.tokens import TokenStore
from laminar.core.records import Trajectory
from laminar.errors import StartError
from laminar.ids import GroupId, PromptId, TrajectoryId

GROUP, A, B = GroupId(7), TrajectoryId(1), TrajectoryId(2)


def delta(attempt: int, start: int, tokens: list[int], sources: bytes = b"", trajectory: int = A) -> Entry:
    return Entry(trajectory, attempt, start, wire.pack_i32(tokens), wire.pack_f32([-1.0] * len(tokens)), sources)


def past(directory: Path, *boots: list[Entry]) -> Past:
    for boot, entries in enumerate(boots, 1):
        (directory / f"{boot:04d}-000001.seg").write_bytes(b"".join(encode(entry) for entry in entries))
    return Past(directory)


def response(found: Past, attempt: int, num_tokens: int) -> list[int]:
    return list(wire.unpack_i32(found.response(A, attempt, num_tokens).tokens))


def record(trajectory: TrajectoryId, num_tokens: int, attempt: int = 1) -> Trajectory:
    return Trajectory(
        id=trajectory, group=GROUP, prompt=PromptId(0), sibling=0, seed=0, attempt=attempt, num_tokens=num_tokens
    )


def test_a_response_is_as_long_as_the_log_says_though_the_segments_have_more(tmp_path: Path) -> None:
    found = past(tmp_path, [delta(1, 0, [1, 2]), delta(1, 2, [3])])
    assert response(found, 1, 2) == [1, 2]


def test_a_delta_that_was_sent_again_is_there_once(tmp_path: Path) -> None:
    found = past(tmp_path, [delta(1, 0, [1, 2])], [delta(1, 0, [1, 2]), delta(1, 2, [3])])
    assert response(found, 1, 3) == [1, 2, 3]


def test_an_attempt_that_goes_on_from_less_than_was_written_wins(tmp_path: Path) -> None:
    found = past(tmp_path, [delta(1, 0, [1, 2, 3])], [delta(2, 2, [8, 9])])
    assert response(found, 2, 4) == [1, 2, 8, 9]
    assert response(found, 1, 3) == [1, 2, 3]


def test_an_attempt_from_the_beginning_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    found = past(tmp_path, [delta(1, 0, [1, 2, 3]), delta(2, 0, [9])])
    assert response(found, 2, 1) == [9]
    assert response(found, 3, 0) == []


def test_sources_of_environment_tokens_come_back_and_are_left_out_without_any(tmp_path: Path) -> None:
    found = past(tmp_path, [delta(1, 0, [1, 2]), delta(1, 2, [3], b"\1")])
    assert found.response(A, 1, 3).sources == b"\0\0\1"
    assert found.response(A, 1, 2).sources == b""


def test_tokens_that_are_lost_are_named(tmp_path: Path) -> None:
    found = past(tmp_path, [delta(1, 0, [1]), delta(1, 5, [6])])
    with pytest.raises(StartError, match=r"have 1 tokens of trajectory .*, the log says 6: .*--from-checkpoint"):
        found.response(A, 1, 6)


def test_a_store_adopts_what_lives_and_unlinks_segments_that_nothing_living_needs(tmp_path: Path) -> None:
    prompt = Entry(0, 0, 0, wire.pack_i32([5]), b"", b"", GROUP)
    other = Entry(0, 0, 0, wire.pack_i32([6]), b"", b"", GroupId(8))
    found = past(tmp_path, [other], [prompt, delta(1, 0, [1, 2]), delta(1, 0, [7], trajectory=B)])
    store = TokenStore(tmp_path, 3)
    store.adopt(found, [record(A, 2), record(B, 0)])
    (row,) = store.rows([A])
    assert (list(wire.unpack_i32(row.prompt_tokens)), list(wire.unpack_i32(row.tokens))) == ([5], [1, 2])
    assert store.prefix(B) == (b"", b"")
    assert sorted(path.name for path in tmp_path.glob("*.seg")) == ["0002-000001.seg", "0003-000001.seg"]
    store.append(A, 1, 3, wire.pack_i32([3]), wire.pack_f32([-1.0]), b"")
    assert list(wire.unpack_i32(store.prefix(A)[0])) == [1, 2, 3]
    store.forget([A, B])
    assert [path.name for path in tmp_path.glob("*.seg")] == ["0003-000001.seg"]
    store.close()
