"""What the token segments of earlier boots give back."""

from pathlib import Path

import msgspec
import pytest

from laminar import wire
from laminar.controller.segments import Deltas, Entry, Past, encode, read_segment
from laminar.controller.tokens import TokenStore
from laminar.core.records import Trajectory, TrajectoryState
from laminar.errors import StartError
from laminar.ids import GroupId, PromptId, TrajectoryId
from tests.test_tokens import report

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


def commit(store: TokenStore) -> None:
    store.sync()
    store.committed()


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


def test_what_a_report_brought_is_read_as_its_deltas(tmp_path: Path) -> None:
    first = report([(A, 1, 2, [1, 2]), (B, 3, 5, []), (B, 3, 7, [8, 9])], sources=b"\0\1\2\0")
    (tmp_path / "0001-000001.seg").write_bytes(encode(deltas_of(first)) + encode(delta(1, 2, [3])))
    found = Past(tmp_path)
    assert found.response(A, 1, 3) == (wire.pack_i32([1, 2, 3]), wire.pack_f32([-1, -2, -1]), b"\0\1\0")
    entry = read_segment(tmp_path / "0001-000001.seg").entries[1]
    assert entry == Entry(B, 3, 5, wire.pack_i32([8, 9]), wire.pack_f32([-8, -9]), b"\2\0")
    assert list(found.trajectories[tmp_path / "0001-000001.seg"]) == [A, B]


def test_deltas_without_some_are_those_of_the_others() -> None:
    all_of_them = [(A, 1, 2, [1, 2]), (B, 3, 7, [8, 9]), (TrajectoryId(3), 1, 0, []), (TrajectoryId(4), 1, 9, [5])]
    sources = b"\0\1\1\0\1"
    assert deltas_of(report(all_of_them, sources)).without([1, 3]) == deltas_of(
        report([all_of_them[0], all_of_them[2]], sources[:2])
    )
    assert deltas_of(report(all_of_them)).without([0]) == deltas_of(report(all_of_them[1:]))


def deltas_of(message: wire.RolloutReport) -> Deltas:
    return Deltas(*(getattr(message, name) for name in Deltas.__struct_fields__))


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
    commit(store)
    assert sorted(path.name for path in tmp_path.glob("*.seg")) == ["0002-000001.seg", "0003-000001.seg"]
    store.take(report([(A, 1, 3, [3])]))
    assert list(wire.unpack_i32(store.prefix(A)[0])) == [1, 2, 3]
    store.forget([A, B])
    commit(store)
    assert [path.name for path in tmp_path.glob("*.seg")] == ["0003-000001.seg"]
    store.close()


# ---- what is damaged ---------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, list[int]]:
    """A segment of a prompt and three deltas, and where its entries begin and end."""
    parts = [encode(entry) for entry in (Entry(0, 0, 0, wire.pack_i32([5]), b"", b"", GROUP), *DELTAS)]
    path = tmp_path / "0001-000001.seg"
    path.write_bytes(b"".join(parts))
    return path, [sum(map(len, parts[:number])) for number in range(len(parts) + 1)]


DELTAS = (delta(1, 0, [1, 2]), delta(1, 2, [3, 4, 5], b"\0\1\0"), delta(1, 5, [6]))
WHOLE = [1, 2, 3, 4, 5, 6]


def test_a_segment_that_ends_anywhere_has_its_whole_entries_and_a_torn_end(written: tuple[Path, list[int]]) -> None:
    path, ends = written
    data = path.read_bytes()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        entries, damages = read_segment(path)
        num_whole = sum(end <= length for end in ends[1:])
        assert len(entries) == num_whole, length
        left = length - ends[num_whole]
        assert [(damage.start, damage.num_bytes, damage.torn) for damage in damages] == (
            [(ends[num_whole], left, True)] if left else []
        )


def test_no_byte_can_be_changed_unnoticed(written: tuple[Path, list[int]]) -> None:
    path, ends = written
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        found = Past(path.parent)
        with pytest.raises(StartError, match=r"token segments are damaged: .*0001-000001\.seg: .*--from-checkpoint"):
            found.check({path.name: len(data)})
        (damage, *_) = found.damages
        assert damage.start == max(start for start in ends[:-1] if start <= position), position


def test_a_segment_shorter_than_the_log_says_or_gone_is_refused(written: tuple[Path, list[int]]) -> None:
    path, ends = written
    lengths = {path.name: ends[-1]}
    for end in ends[:-1]:  # whole entries only: nothing in the file shows it
        path.write_bytes(path.read_bytes()[:end] if end else b"")
        with pytest.raises(StartError, match=rf"0001-000001\.seg has {end} of {ends[-1]} bytes"):
            Past(path.parent).check(lengths)
        path.write_bytes(b"".join(encode(e) for e in (Entry(0, 0, 0, wire.pack_i32([5]), b"", b"", GROUP), *DELTAS)))
    path.unlink()
    with pytest.raises(StartError, match=rf"0001-000001\.seg has 0 of {ends[-1]} bytes"):
        Past(path.parent).check(lengths)


@pytest.mark.parametrize("tail", [b"\0" * 600, b"\x07", encode(DELTAS[0])[:-1], b"\xff" * 40])
def test_whatever_follows_what_the_log_says_is_cut_off(written: tuple[Path, list[int]], tail: bytes) -> None:
    path, ends = written
    path.write_bytes(path.read_bytes() + tail)
    found = Past(path.parent)
    found.check({path.name: ends[-1]})
    assert response(found, 1, 6) == WHOLE
    assert [(damage.start, damage.num_bytes) for damage in found.damages] == [(ends[-1], len(tail))]
    assert "not written to the end" in str(found.damages[0]) or "damaged" in str(found.damages[0])


def test_a_torn_end_that_one_controller_left_out_is_no_damage_to_the_next(written: tuple[Path, list[int]]) -> None:
    path, ends = written
    path.write_bytes(path.read_bytes() + encode(DELTAS[0])[:-1])
    first = Past(path.parent)
    first.check({path.name: ends[-1]})
    store = TokenStore(path.parent, 2)
    store.adopt(first, [record(A, 6)])
    logged = {row[0]: row[1] for statement, row in store.sync() if statement.startswith("INSERT")}
    store.committed()
    assert logged[path.name] == ends[-1]
    second = Past(path.parent)  # killed again, before the group of the segment was forgotten
    second.check(logged)
    assert response(second, 1, 6) == WHOLE
    store.close()


def test_entries_after_a_damaged_one_are_still_read(written: tuple[Path, list[int]]) -> None:
    path, ends = written
    data = bytearray(path.read_bytes())
    data[ends[2] - 1] ^= 1
    path.write_bytes(data)
    entries, (damage,) = read_segment(path)
    assert [entry.start for entry in entries] == [0, 2, 5]
    assert (damage.start, damage.num_bytes, damage.torn) == (ends[1], ends[2] - ends[1], False)


def test_a_prompt_that_is_lost_is_named(tmp_path: Path) -> None:
    done = msgspec.structs.replace(record(A, 2), state=TrajectoryState.DONE, num_prompt_tokens=1)
    with pytest.raises(StartError, match=r"have 0 tokens of the prompt of trajectory .*, the log says 1"):
        TokenStore(tmp_path / "new", 2).adopt(past(tmp_path, [delta(1, 0, [1, 2])]), [done])
