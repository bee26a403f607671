"""Which bytes of a version each rank writes: what ranks may say alone and together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.workers.relay.manifest import Manifest
from laminar.workers.relay.protocol import RelayError
from laminar.workers.relay.ranges import check_rank, check_world, pack, unpack

MANIFEST = Manifest.plan([("embed", "float32", (6, 10), 4), ("norm", "bfloat16", (7,), 2), ("scale", "float32", (), 4)])
EMBED, NORM, SCALE = MANIFEST.tensors
Ranges = dict[int, list[tuple[int, int]]]


def refused(ranges: Ranges, manifest: Manifest = MANIFEST) -> str:
    """What is said of these ranks; empty = nothing."""
    packed = {rank: pack(pairs) for rank, pairs in ranges.items()}
    try:
        for rank, pairs in packed.items():
            check_rank(manifest, rank, pairs)
        check_world(manifest, packed)
    except RelayError as error:
        return str(error)
    return ""


def halves() -> Ranges:
    """Two ranks: half of the rows each, the scalar is the first's."""
    return {
        0: [(0, 120), (NORM.offset, NORM.offset + 8), (SCALE.offset, SCALE.offset + 4)],
        1: [(120, 240), (NORM.offset + 8, NORM.offset + 14)],
    }


def test_rows_of_every_tensor_shared_among_the_ranks_are_a_whole_version():
    assert refused(halves()) == ""
    assert refused({rank: halves().get(rank, []) for rank in range(3)}) == "", "a rank may have nothing to write"


def test_a_hole_names_the_tensor_its_elements_and_who_writes_before_it():
    ranges = halves()
    ranges[1][0] = (160, 240)
    assert refused(ranges) == "no rank writes elements 30 to 40 of 'embed' float32[6, 10] behind those of rank 0"
    ranges[1] = [(120, 240)]
    assert refused(ranges) == "no rank writes elements 4 to 7 of 'norm' bfloat16[7] behind those of rank 0"
    assert refused({0: halves()[0][:2], 1: halves()[1]}) == "no rank writes elements 0 to 1 of 'scale' float32[]"


def test_an_overlap_names_the_tensor_its_elements_and_both_ranks():
    ranges = halves()
    ranges[1][0] = (80, 240)
    assert refused(ranges) == "ranks 0 and 1 both write elements 20 to 30 of 'embed' float32[6, 10]"


@pytest.mark.parametrize(
    "pair",
    [(-4, 8), (236, 244), (0, 6), (2, 8), (8, 8), (8, 4), (NORM.offset - 4, NORM.offset), (1 << 40, (1 << 40) + 4)],
    ids=["before", "beyond", "half an element", "misaligned", "empty", "backward", "padding", "far"],
)
def test_what_is_not_whole_elements_of_one_tensor_is_refused_with_the_rank(pair: tuple[int, int]):
    assert f"rank 5 writes bytes {pair[0]} to {pair[1]}" in refused({5: [pair]})


def test_a_rank_names_its_ranges_in_order_and_once():
    assert "rank 0 writes bytes 0 to 8" in refused({0: [(40, 80), (0, 8)]})
    assert "rank 0 writes bytes 20 to 60" in refused({0: [(0, 40), (20, 60)]})


def test_bytes_that_are_no_pairs_are_refused():
    with pytest.raises(RelayError, match="ranges of 17 bytes"):
        unpack(bytes(17))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Manifest, Ranges]:
    """Any tensors, each cut anywhere among the ranks, in any order of ranks."""
    tensors = draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.sampled_from([2, 4])), min_size=1, max_size=5)
    )
    manifest = Manifest.plan(
        [(f"t{i}", f"d{item}", (rows, columns), item) for i, (rows, columns, item) in enumerate(tensors)]
    )
    world_size = draw(st.integers(1, 4))
    ranges: Ranges = {rank: [] for rank in range(world_size)}
    for spec in manifest.tensors:
        row_bytes = spec.num_bytes // spec.shape[0] if spec.num_bytes else 0
        cuts = sorted(draw(st.lists(st.integers(0, spec.shape[0]), min_size=world_size - 1, max_size=world_size - 1)))
        ranks = draw(st.permutations(range(world_size)))
        for rank, first, last in zip(ranks, [0, *cuts], [*cuts, spec.shape[0]], strict=True):
            if row_bytes and first < last:
                ranges[rank].append((spec.offset + first * row_bytes, spec.offset + last * row_bytes))
    return manifest, ranges


@given(worlds())
def test_any_division_of_rows_is_whole(world: tuple[Manifest, Ranges]):
    manifest, ranges = world
    assert refused(ranges, manifest) == ""


@given(worlds(), st.data())
def test_whatever_is_taken_away_or_written_twice_is_found(world: tuple[Manifest, Ranges], data: st.DataObject):
    """Exactly the divisions in which every byte of every tensor has one writer pass: compared with counting byte by byte."""
    manifest, ranges = world
    for rank, pairs in ranges.items():
        for at, (start, end) in enumerate(pairs):
            spec = next(spec for spec in manifest.tensors if spec.offset <= start < spec.offset + spec.num_bytes)
            item = spec.num_bytes // (spec.shape[0] * spec.shape[1])
            low = data.draw(st.integers(spec.offset // item, (end - 1) // item)) * item
            pairs[at] = data.draw(st.sampled_from([(start, end), (low, end)]))
        ranges[rank] = data.draw(st.sampled_from([pairs, pairs[1:]]))
    writers = [0] * (manifest.num_bytes + 1)
    for pairs in ranges.values():
        for start, end in pairs:
            for position in range(start, end):
                writers[position] += 1
    due = [position for spec in manifest.tensors for position in range(spec.offset, spec.offset + spec.num_bytes)]
    assert (refused(ranges, manifest) == "") == all(writers[position] == 1 for position in due)
