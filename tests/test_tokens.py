"""The token store on real files: deltas, attempts, prefixes, segments, and readers in other threads."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from laminar import wire
from laminar.controller import tokens
from laminar.controller import tokens as tokens_module
from laminar.controller.schema import Statement
from laminar.controller.segments import Entry, read_segment
from laminar.controller.tokens import TokenStore
from laminar.errors import ProtocolError
from laminar.ids import GroupId, TrajectoryId

pytestmark = pytest.mark.timeout(30)

A, B = TrajectoryId(11), TrajectoryId(12)
GROUP, OTHER = GroupId(7), GroupId(8)
i32, f32 = wire.pack_i32, wire.pack_f32


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return TokenStore(tmp_path / "tokens", boot=3)


def started(store: TokenStore, *trajectories: TrajectoryId, group: GroupId = GROUP, attempt: int = 1) -> None:
    for trajectory in trajectories:
        store.start(trajectory, attempt, group, resume=False)


def put(
    store: TokenStore, trajectory: TrajectoryId, attempt: int, total: int, ids: list[int], sources: bytes = b""
) -> None:
    store.take(report([(trajectory, attempt, total, ids)], sources, f32([-0.5] * len(ids))))


def report(
    deltas: list[tuple[int, int, int, list[int]]], sources: bytes = b"", logprobs: bytes | None = None
) -> wire.RolloutReport:
    """`deltas`: (trajectory, attempt, total, new tokens)."""
    ids = [token for delta in deltas for token in delta[3]]
    return wire.RolloutReport(
        version=None,
        trajectories=wire.pack_i64([d[0] for d in deltas]),
        attempts=i32([d[1] for d in deltas]),
        num_tokens=i32([d[2] for d in deltas]),
        num_new=i32([len(d[3]) for d in deltas]),
        tokens=i32(ids),
        logprobs=f32([-float(token) for token in ids]) if logprobs is None else logprobs,
        sources=sources,
    )


def commit(store: TokenStore) -> list[Statement]:
    """As the event log does."""
    statements = store.sync()
    store.committed()
    return statements


def files(store: TokenStore) -> list[str]:
    return sorted(path.name for path in store._directory.iterdir())


def test_a_report_is_cut_into_the_deltas_of_its_trajectories(store: TokenStore) -> None:
    started(store, A, B)
    store.take(report([(A, 1, 2, [1, 2]), (B, 1, 0, []), (B, 1, 1, [3])]))
    store.take(report([(A, 1, 3, [4])]))
    assert store.prefix(A) == (i32([1, 2, 4]), f32([-1, -2, -4]))
    assert store.prefix(B) == (i32([3]), f32([-3]))


@pytest.mark.parametrize("total", [1, 2, 4, 0, -1])
def test_a_delta_that_does_not_continue_what_is_held_is_refused_and_changes_nothing(
    store: TokenStore, total: int
) -> None:
    started(store, A)
    put(store, A, 1, 2, [1, 2])
    with pytest.raises(ProtocolError, match=r"trajectory 0\.11: a delta starts at token -?\d+, but 2 are held"):
        put(store, A, 1, total, [9])
    assert store.prefix(A)[0] == i32([1, 2])


def test_a_report_with_one_delta_that_does_not_fit_is_refused_whole(store: TokenStore) -> None:
    started(store, A, B)
    with pytest.raises(ProtocolError, match=r"trajectory 0\.12: a delta starts at token 4, but 0 are held"):
        store.take(report([(A, 1, 1, [1]), (B, 1, 5, [9])]))
    assert store.num_bytes == 0
    store.sync()
    assert read_segment(store._directory / "0003-000001.seg").entries == []


def test_words_of_an_old_attempt_in_a_report_reach_neither_memory_nor_disk(store: TokenStore) -> None:
    started(store, A, B)
    store.start(A, 2, GROUP, resume=True)
    deltas = [(A, 1, 2, [8, 8]), (99, 1, 1, [8]), (A, 2, 1, [1]), (B, 1, 0, []), (B, 1, 2, [2, 3])]
    store.take(report(deltas, sources=b"\2\2\2\0\0\1"))
    assert [store.prefix(t)[0] for t in (A, B)] == [i32([1]), i32([2, 3])]
    store.sync()
    assert read_segment(store._directory / "0003-000001.seg").entries == [
        Entry(A, 2, 0, i32([1]), f32([-1]), b"\0"), Entry(B, 1, 0, i32([2, 3]), f32([-2, -3]), b"\0\1")
    ]  # fmt: skip


def test_words_of_an_old_attempt_or_an_unknown_trajectory_are_ignored(store: TokenStore) -> None:
    started(store, A)
    put(store, A, 1, 1, [1])
    store.start(A, 2, GROUP, resume=True)
    put(store, A, 1, 2, [9])
    put(store, B, 1, 1, [9])
    put(store, A, 2, 2, [2])
    assert store.prefix(A)[0] == i32([1, 2])
    assert store.prefix(B) == (b"", b"")


def test_an_attempt_without_resume_starts_from_nothing(store: TokenStore) -> None:
    started(store, A)
    put(store, A, 1, 2, [1, 2], b"\0\1")
    store.start(A, 2, GROUP, resume=False)
    assert store.prefix(A) == (b"", b"")
    store.put_prompt(GROUP, i32([5]))
    put(store, A, 2, 1, [3])
    assert store.rows([A]) == [wire.TokenRow(A, i32([5]), i32([3]), f32([-0.5]), b"")]


@pytest.mark.parametrize(
    "broken",
    [
        {"trajectories": wire.pack_i64([A, B])},
        {"attempts": i32([])},
        {"num_new": i32([2])},
        {"tokens": i32([1, 2])},
        {"tokens": b"\0\0\0"},
        {"logprobs": f32([0, 0])},
        {"logprobs": b""},
        {"sources": b"\0\0"},
        {"trajectories": b"\0"},
    ],
)
def test_a_report_whose_arrays_do_not_fit_is_refused_whole(store: TokenStore, broken: dict[str, bytes]) -> None:
    started(store, A)
    good = {
        "trajectories": wire.pack_i64([A]),
        "attempts": i32([1]),
        "num_tokens": i32([1]),
        "num_new": i32([1]),
        "tokens": i32([1]),
        "logprobs": f32([0]),
    }
    with pytest.raises(ProtocolError):
        store.take(wire.RolloutReport(version=None, **(good | broken)))
    assert store.prefix(A) == (b"", b"")


def test_negative_counts_that_add_up_are_refused(store: TokenStore) -> None:
    started(store, A, B)
    message = wire.RolloutReport(
        version=None,
        trajectories=wire.pack_i64([A, B]),
        attempts=i32([1, 1]),
        num_tokens=i32([2, -1]),
        num_new=i32([2, -1]),
        tokens=i32([1]),
        logprobs=f32([0]),
    )
    with pytest.raises(ProtocolError):
        store.take(message)
    assert store.prefix(A) == (b"", b"")


def test_sources_say_which_tokens_are_the_environments(store: TokenStore) -> None:
    started(store, A, B)
    store.put_prompt(GROUP, i32([5]))
    store.take(report([(A, 1, 2, [1, 2])]))
    store.take(report([(A, 1, 3, [3]), (B, 1, 1, [7])], sources=b"\1\0"))
    store.take(report([(A, 1, 4, [4]), (B, 1, 2, [8])]))
    assert [row.sources for row in store.rows([A, B])] == [b"\0\0\1\0", b"\0\0"]


def test_sources_are_empty_while_the_model_alone_spoke(store: TokenStore) -> None:
    started(store, A)
    store.put_prompt(GROUP, i32([5]))
    put(store, A, 1, 1, [1])
    assert store.rows([A])[0].sources == b""


def test_rows_name_the_trajectory_that_is_not_held(store: TokenStore) -> None:
    started(store, A)
    with pytest.raises(KeyError, match="11"):
        store.rows([A])
    store.put_prompt(GROUP, i32([5]))
    assert store.rows([A])[0].prompt_tokens == i32([5])
    with pytest.raises(KeyError, match="12"):
        store.rows([A, B])


def test_the_prompt_of_a_forgotten_group_is_not_kept(store: TokenStore) -> None:
    store.put_prompt(GROUP, i32([5]))
    started(store, A)
    with pytest.raises(KeyError):
        store.rows([A])


def test_forgotten_trajectories_free_their_memory(store: TokenStore) -> None:
    started(store, A, B)
    put(store, A, 1, 1, [1])
    store.forget([A, B, TrajectoryId(99)])
    assert store.num_bytes == 0
    store.forget([A])


# ---- segments ----------------------------------------------------------------------------------------------


def test_what_was_handed_over_is_on_disk_after_sync_and_not_before(store: TokenStore) -> None:
    started(store, A)
    store.put_prompt(GROUP, i32([5]))
    put(store, A, 1, 2, [1, 2], b"\0\1")
    path = store._directory / "0003-000001.seg"
    assert read_segment(path).entries == []
    store.sync()
    expected = [Entry(0, 0, 0, i32([5]), b"", b"", GROUP), Entry(A, 1, 0, i32([1, 2]), f32([-0.5, -0.5]), b"\0\1")]
    assert read_segment(path).entries == expected


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "SEGMENT_BYTES", 100)


@pytest.mark.usefixtures("small_segments")
def test_full_segments_are_followed_by_new_ones_and_lose_nothing(store: TokenStore) -> None:
    started(store, A)
    for number in range(40):
        put(store, A, 1, number + 1, [number])
    store.sync()
    entries = [entry for name in files(store) for entry in read_segment(store._directory / name).entries]
    assert len(files(store)) > 3
    assert [entry.start for entry in entries] == list(range(40))
    assert b"".join(entry.tokens for entry in entries) == store.prefix(A)[0]


@pytest.mark.usefixtures("small_segments")
def test_a_segment_grows_while_no_other_can_be_made_and_what_cannot_be_unlinked_is_unlinked_later(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    started(store, A)
    with monkeypatch.context() as locked:
        locked.setattr(tokens.os, "open", refused)
        for number in range(20):
            put(store, A, 1, number + 1, [number])
        assert len(files(store)) == 1
    put(store, A, 1, 21, [20])
    store.sync()
    assert len(files(store)) == 2
    assert len(read_segment(store._directory / files(store)[0]).entries) == 21
    store.forget([A])
    with monkeypatch.context() as locked:
        locked.setattr(Path, "unlink", refused)
        commit(store)
        assert len(files(store)) == 2
    commit(store)
    assert len(files(store)) == 1


@pytest.mark.usefixtures("small_segments")
def test_forgetting_unlinks_every_segment_that_nobody_needs(store: TokenStore) -> None:
    started(store, A)
    started(store, B, group=OTHER)
    for number in range(20):
        put(store, A, 1, number + 1, [number])
    put(store, B, 1, 1, [1])
    shared = files(store)[-1]
    for number in range(20, 40):
        put(store, A, 1, number + 1, [number])
    store.sync()
    store.forget([A])
    commit(store)
    assert set(files(store)) <= {shared, files(store)[-1]}
    assert shared in files(store)
    store.forget([B])
    commit(store)
    assert len(files(store)) == 1  # the open one
    store.finish()
    commit(store)
    store.close()
    assert files(store) == []


@pytest.mark.usefixtures("small_segments")
def test_a_segment_leaves_the_log_before_it_leaves_the_disk(store: TokenStore) -> None:
    started(store, A)
    put(store, A, 1, 30, list(range(30)))
    assert [(sql.split()[0], row[:2]) for sql, row in commit(store)] == [("INSERT", ("0003-000001.seg", 284))]
    store.forget([A])
    assert store.sync() == [("DELETE FROM segments WHERE name = ?", ("0003-000001.seg",))]
    assert len(files(store)) == 2, "the log may not have taken that yet"
    store.committed()
    assert files(store) == ["0003-000002.seg"]


@pytest.mark.usefixtures("small_segments")
def test_the_delta_that_fills_a_segment_is_forgotten_with_the_others(store: TokenStore) -> None:
    started(store, A)
    put(store, A, 1, 30, list(range(30)))  # alone fills the first segment
    started(store, B, group=OTHER)
    put(store, B, 1, 30, list(range(30)))
    store.sync()
    store.forget([A])
    store.forget([B])
    commit(store)
    assert len(files(store)) == 1


@pytest.mark.usefixtures("small_segments")
def test_a_segment_with_the_prompt_stays_as_long_as_its_group(store: TokenStore) -> None:
    started(store, A, B)
    store.put_prompt(GROUP, i32(list(range(30))))
    put(store, A, 1, 30, list(range(30)))
    store.sync()
    store.forget([A])
    assert read_segment(store._directory / "0003-000001.seg").entries[0].group == GROUP
    store.forget([B])
    commit(store)
    assert len(files(store)) == 1


@pytest.mark.usefixtures("small_segments")
def test_segments_that_were_unlinked_before_they_were_written_do_no_harm(store: TokenStore) -> None:
    started(store, A)
    put(store, A, 1, 30, list(range(30)))
    store.forget([A])
    started(store, B, group=OTHER)
    put(store, B, 1, 1, [1])
    commit(store)
    assert [entry.trajectory for name in files(store) for entry in read_segment(store._directory / name).entries] == [B]
    store.close()


def test_a_new_boot_does_not_touch_the_segments_of_the_old(tmp_path: Path, store: TokenStore) -> None:
    started(store, A)
    put(store, A, 1, 1, [1])
    store.close()
    new = TokenStore(tmp_path / "tokens", boot=4)
    new.finish()
    commit(new)
    new.close()
    assert files(store) == ["0003-000001.seg"]


# ---- threads -----------------------------------------------------------------------------------------------


def test_the_loop_hands_tokens_over_while_the_disk_is_busy(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    started(store, A)
    put(store, A, 1, 1, [1])
    entered, go_on = threading.Event(), threading.Event()

    def slow(file: int) -> None:
        entered.set()
        assert go_on.wait(10)

    monkeypatch.setattr(tokens.os, "fdatasync", slow)
    monkeypatch.setattr(tokens, "SEGMENT_BYTES", 10)
    writer = threading.Thread(target=store.sync)
    writer.start()
    assert entered.wait(10)
    put(store, A, 1, 2, [2])  # begins a new segment, too
    put(store, A, 1, 3, [3])
    go_on.set()
    writer.join(10)
    store.sync()
    entries = [entry for name in files(store) for entry in read_segment(store._directory / name).entries]
    assert [entry.start for entry in entries] == [0, 1, 2]


def test_a_disk_that_hangs_does_not_hang_the_end(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    started(store, A)
    put(store, A, 1, 1, [1])
    entered, go_on = threading.Event(), threading.Event()

    def hangs(file: int) -> None:
        entered.set()
        assert go_on.wait(30)

    monkeypatch.setattr(tokens.os, "fdatasync", hangs)
    writer = threading.Thread(target=store.sync)
    writer.start()
    assert entered.wait(10)
    with pytest.raises(TimeoutError, match=r"has not taken the last tokens within 0\.05 s"):
        store.close(timeout_s=0.05)
    go_on.set()
    writer.join(10)
    store.close()


async def test_rows_read_in_a_thread_are_whole_while_the_loop_appends(store: TokenStore) -> None:
    started(store, A)
    store.put_prompt(GROUP, i32([5]))
    stop = threading.Event()

    def read() -> int:
        num_reads = 0
        while not stop.is_set() or not num_reads:
            row = store.rows([A])[0]
            ids = wire.unpack_i32(row.tokens)
            assert ids == list(range(len(ids)))
            assert len(row.logprobs) == len(row.tokens)
            assert len(row.sources) in (0, len(ids))
            num_reads += 1
        return num_reads

    readers = [asyncio.create_task(asyncio.to_thread(read)) for _ in range(2)]
    for number in range(3000):
        put(store, A, 1, number + 1, [number], b"\1" if number % 7 == 0 else b"")
        if number % 50 == 0:
            await asyncio.sleep(0)
            store.sync()
    stop.set()
    assert all(await asyncio.gather(*readers))


def test_an_attempt_may_have_a_prompt_of_its_own(store: TokenStore) -> None:
    started(store, A, B)
    store.put_own_prompt(A, 1, i32([5, 6]))
    put(store, A, 1, 1, [1])
    with pytest.raises(KeyError):
        store.rows([B])
    store.put_own_prompt(B, 1, i32([7]))
    assert [wire.unpack_i32(row.prompt_tokens) for row in store.rows([A, B])] == [[5, 6], [7]]
    store.sync()
    path = store._directory / files(store)[0]
    assert [(entry.trajectory, entry.group, wire.unpack_i32(entry.tokens)) for entry in read_segment(path).entries] == [
        (A, GROUP, [5, 6]), (A, 0, [1]), (B, GROUP, [7])
    ]  # fmt: skip


def test_an_attempt_that_starts_again_has_no_prompt_until_it_says_so_itself(store: TokenStore) -> None:
    started(store, A)
    store.put_own_prompt(A, 1, i32([5, 6]))
    put(store, A, 1, 1, [1])
    started(store, A, attempt=2)
    store.put_own_prompt(A, 1, i32([5, 6]))  # an old attempt's last words
    with pytest.raises(KeyError):
        store.rows([A])
    store.put_own_prompt(A, 2, i32([8]))
    assert wire.unpack_i32(store.rows([A])[0].prompt_tokens) == [8]


def test_what_a_full_disk_did_not_take_is_written_later_once_and_in_order(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, room = os.write, [10]

    def write(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = really(file, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(tokens_module.os, "write", write)
    store.start(A, 1, GROUP, False)
    put(store, A, 1, 2, [1, 2])
    with pytest.raises(OSError, match="No space left"):
        store.sync()
    put(store, A, 1, 3, [3])
    room[0] = 1 << 20
    store.sync()
    entries = [entry for name in files(store) for entry in read_segment(store._directory / name).entries]
    assert [(entry.start, list(wire.unpack_i32(entry.tokens))) for entry in entries] == [(0, [1, 2]), (2, [3])]
