"""Deltas between versions: lossless, small where little changed, and harmless when they are wrong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from laminar.errors import ProtocolError
from laminar.workers.relay import delta

WIDTHS = pytest.mark.parametrize("item_bytes", [2, 4])


def raw(items: np.ndarray) -> memoryview:
    return memoryview(items).cast("B")


def rebuilt(new: np.ndarray, base: np.ndarray) -> bytes | None:
    """What a receiver that holds `base` makes of the delta; None if the sender prefers the full bytes."""
    made = delta.encode(raw(new), raw(base), new.itemsize)
    if made is None:
        return None
    slot = bytearray(base.tobytes())
    delta.apply(made, memoryview(slot), new.itemsize)
    return bytes(slot)


def few_changes(
    rng: np.random.Generator, num_items: int, share: float, item_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    kind = delta.ITEM_TYPES[item_bytes]
    base = rng.integers(0, 1 << 8 * item_bytes, num_items, dtype=kind)
    new = base.copy()
    at = rng.choice(num_items, int(share * num_items), replace=False)
    new[at] += rng.choice(np.array([1, 2, -1, -2, 127, -127, 128, -128, 129, 30000], np.int64), len(at)).astype(kind)
    return new, base


@WIDTHS
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.1, 0.2])
def test_a_receiver_rebuilds_the_very_bytes(item_bytes: int, share: float):
    new, base = few_changes(np.random.default_rng(1), 1 << 16, share, item_bytes)
    assert rebuilt(new, base) == new.tobytes()


@given(st.data(), st.sampled_from([2, 4]), st.integers(1, 300))
def test_whatever_changed_the_delta_is_lossless_or_not_made(data: st.DataObject, item_bytes: int, num_words: int):
    kind = delta.ITEM_TYPES[item_bytes]
    num_items = num_words * delta.WORD_BYTES // item_bytes
    base = data.draw(arrays.arrays(kind, num_items))
    new = base.copy()
    for at in data.draw(st.lists(st.integers(0, num_items - 1), max_size=20)):
        new[at] = data.draw(st.integers(0, (1 << 8 * item_bytes) - 1))
    assert rebuilt(new, base) in (None, new.tobytes())


@WIDTHS
def test_first_last_and_far_elements_are_reached(item_bytes: int):
    base = np.zeros(100_000, delta.ITEM_TYPES[item_bytes])
    new = base.copy()
    new[[0, 62, 63, 126, 190, 255, 511, 512, 70_000, 99_999]] = [1, 200, 3, 40_000, 5, 65_535, 127, 128, 65_534, 65_408]
    assert rebuilt(new, base) == new.tobytes()


@WIDTHS
def test_a_chunk_of_which_one_percent_changed_by_a_little_takes_a_thirtieth_at_most(item_bytes: int):
    rng = np.random.default_rng(2)
    base = rng.integers(0, 1 << 15, 1 << 19, dtype=delta.ITEM_TYPES[item_bytes])
    new = base.copy()
    at = rng.choice(len(base), len(base) // 100, replace=False)
    new[at] += rng.integers(1, 3, len(at), dtype=new.dtype)
    made = delta.encode(raw(new), raw(base), item_bytes)
    assert made is not None
    assert len(made) * 30 <= new.nbytes


@WIDTHS
def test_a_chunk_that_changed_everywhere_is_sent_whole(item_bytes: int):
    rng = np.random.default_rng(3)
    base = rng.integers(0, 1 << 15, 1 << 16, dtype=delta.ITEM_TYPES[item_bytes])
    assert delta.encode(raw(base + 1), raw(base), item_bytes) is None


def test_the_pace_settles_on_what_is_faster_and_looks_again_now_and_then():
    for delta_s, full_s, expected in ((1.0, 10.0, True), (10.0, 1.0, False)):
        pace = delta.Pace()
        chosen = []
        for _ in range(4 * delta.TRY_EVERY * delta.RUN_CHUNKS):
            chosen.append(pace.prefers_delta())
            pace.took(1 << 20, delta_s if chosen[-1] else full_s, as_delta=chosen[-1])
        assert chosen.count(expected) >= len(chosen) - 6 * delta.RUN_CHUNKS
        assert set(chosen) == {True, False}


def test_deltas_that_looked_a_little_slower_once_are_soon_tried_again():
    pace, took = delta.Pace(), iter([1.5] * delta.RUN_CHUNKS)
    chosen = []
    for _ in range(100 * delta.RUN_CHUNKS):
        chosen.append(pace.prefers_delta())
        pace.took(1 << 20, next(took, 0.1) if chosen[-1] else 1.0, as_delta=chosen[-1])
    assert chosen.count(False) < 30 * delta.RUN_CHUNKS


class SlowLink:
    """A link of 25 MB/s whose socket takes 4 MiB at once; `sent` says how long a sender was held up."""

    def __init__(self) -> None:
        self.now = self.empty_at = 0.0

    def sent(self, num_bytes: int, made_s: float) -> float:
        began = self.now
        self.now += made_s
        self.empty_at = max(self.empty_at, self.now) + num_bytes / 25e6
        self.now = max(self.now, self.empty_at - (4 << 20) / 25e6)
        return self.now - began


def test_whole_chunks_that_vanish_into_the_buffers_of_a_slow_link_do_not_look_fast():
    pace, link, whole = delta.Pace(), SlowLink(), []
    for _ in range(4 * delta.TRY_EVERY * delta.RUN_CHUNKS):
        as_delta = pace.prefers_delta()
        whole.append(not as_delta)
        pace.took(1 << 20, link.sent(*((23_000, 0.7e-3) if as_delta else (1 << 20, 0.1e-3))), as_delta=as_delta)
    assert sum(whole) <= 6 * delta.RUN_CHUNKS


def test_bytes_that_have_no_delta_are_refused():
    for new, base, item_bytes in ((16, 8, 2), (12, 12, 2), (16, 16, 1), (16, 16, 8)):
        with pytest.raises(ValueError, match="have no delta"):
            delta.encode(memoryview(bytes(new)), memoryview(bytes(base)), item_bytes)


@given(st.data())
def test_a_damaged_delta_is_refused_or_changes_nothing_but_its_own_chunk(data: st.DataObject):
    new, base = few_changes(np.random.default_rng(4), 512, 0.05, 2)
    made = delta.encode(raw(new), raw(base), 2)
    assert made is not None
    damaged = bytearray(made)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))] if data.draw(st.booleans()) else damaged
    guarded = bytearray(b"\xaa" * 64 + base.tobytes() + b"\xaa" * 64)
    try:
        delta.apply(bytes(damaged), memoryview(guarded)[64:-64], 2)
    except ProtocolError:
        assert bytes(guarded[64:-64]) == base.tobytes(), "a refused delta wrote something"
    assert (guarded[:64], guarded[-64:]) == (b"\xaa" * 64, b"\xaa" * 64)


def test_a_delta_for_another_chunk_or_element_is_refused():
    new, base = few_changes(np.random.default_rng(5), 512, 0.05, 2)
    made = delta.encode(raw(new), raw(base), 2)
    assert made is not None
    with pytest.raises(ProtocolError, match="1024 bytes for a chunk of 512"):
        delta.apply(made, memoryview(bytearray(512)), 2)
    with pytest.raises(ProtocolError, match="elements of 2 bytes, not 4"):
        delta.apply(made, memoryview(bytearray(1024)), 4)
