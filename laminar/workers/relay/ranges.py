"""Which bytes of a version each rank writes, and whether all ranks together write every byte of every tensor once.

FSDP2 shards dim 0, so a rank has one contiguous range per tensor at most. On the wire the ranges of a rank are pairs of
little-endian int64, (start, end) in the version, in ascending order.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from laminar.workers.relay.manifest import ALIGN, Manifest, TensorSpec
from laminar.workers.relay.protocol import RelayError

Pairs = npt.NDArray[np.int64]
"""int64 (ranges, 2): start, end."""
PAIR_BYTES = 16


def pack(ranges: Iterable[tuple[int, int]]) -> bytes:
    """(start, end) of each range."""
    return np.array(list(ranges), "<i8").tobytes()


def unpack(packed: bytes) -> Pairs:
    """Raises RelayError for what is no list of pairs."""
    if len(packed) % PAIR_BYTES:
        raise RelayError(f"ranges of {len(packed)} bytes: expected pairs of {PAIR_BYTES} bytes")
    return np.frombuffer(packed, "<i8").astype(np.int64).reshape(-1, 2)


def check_manifest(manifest: Manifest) -> None:
    """Raises RelayError for a layout whose tensors overlap, are not aligned, or leave the range."""
    end = 0
    for spec in manifest.tensors:
        if spec.offset % ALIGN or spec.offset < end or spec.num_bytes < 0:
            raise RelayError(
                f"manifest: tensor {spec.name!r} at byte {spec.offset} overlaps its predecessor (ends at {end}) "
                f"or is not at a multiple of {ALIGN}; lay tensors out with Manifest.plan"
            )
        end = spec.offset + spec.num_bytes
    if manifest.num_bytes < max(end, 1):
        raise RelayError(f"manifest: the range has {manifest.num_bytes} bytes, its tensors need {max(end, 1)}")


def check_rank(manifest: Manifest, rank: int, packed: bytes) -> None:
    """Raises RelayError unless each range is whole elements of one tensor, behind the one before."""
    pairs = unpack(packed)
    if not len(pairs):
        return
    starts, ends = pairs[:, 0], pairs[:, 1]
    offsets, sizes, items = _columns(manifest)
    if not len(offsets):
        raise RelayError(f"rank {rank} writes {len(pairs)} ranges of a version whose tensors have no bytes")
    at = np.clip(np.searchsorted(offsets, starts, "right") - 1, 0, len(offsets) - 1)
    inside = (starts >= offsets[at]) & (starts < ends) & (ends <= offsets[at] + sizes[at])
    whole = ((starts - offsets[at]) % items[at] == 0) & ((ends - offsets[at]) % items[at] == 0)
    ascending = np.concatenate(([True], starts[1:] >= ends[:-1]))
    bad = np.flatnonzero(~(inside & whole & ascending))
    if len(bad):
        first = int(bad[0])
        spec = manifest.tensors[int(at[first])]
        raise RelayError(
            f"rank {rank} writes bytes {starts[first]} to {ends[first]}, which are not whole elements of one tensor behind its "
            f"other ranges; {_describe(spec)} is the nearest"
        )


def check_world(manifest: Manifest, packed: dict[int, bytes]) -> None:
    """Raises RelayError if two ranks write the same byte of a tensor, or nobody writes one. Each rank's passed `check_rank`."""
    pairs = np.concatenate([unpack(ranges) for ranges in packed.values()])
    ranks = np.repeat(list(packed), [len(ranges) // PAIR_BYTES for ranges in packed.values()])
    order = np.argsort(pairs[:, 0], kind="stable")
    pairs, ranks = pairs[order], ranks[order]
    _check_overlap(manifest, pairs, ranks)
    _check_holes(manifest, pairs, ranks)


def _check_overlap(manifest: Manifest, pairs: Pairs, ranks: npt.NDArray[np.int64]) -> None:
    both = np.flatnonzero(pairs[1:, 0] < pairs[:-1, 1])
    if len(both):
        at = int(both[0])
        start, end = int(pairs[at + 1, 0]), int(min(pairs[at, 1], pairs[at + 1, 1]))
        spec = _tensor_at(manifest, start)
        raise RelayError(
            f"ranks {ranks[at]} and {ranks[at + 1]} both write elements {_elements(spec, start, end)} of {_describe(spec)}"
        )


def _check_holes(manifest: Manifest, pairs: Pairs, ranks: npt.NDArray[np.int64]) -> None:
    """Of ranges that do not overlap."""
    offsets, sizes, _ = _columns(manifest)
    at = np.searchsorted(offsets, pairs[:, 0], "right") - 1
    written = np.zeros(len(offsets), np.int64)
    np.add.at(written, at, pairs[:, 1] - pairs[:, 0])
    holes = np.flatnonzero(written != sizes)
    if not len(holes):
        return
    spec = [spec for spec in manifest.tensors if spec.num_bytes][int(holes[0])]
    position, before = spec.offset, ""
    for (start, end), rank in zip(pairs[at == holes[0]].tolist(), ranks[at == holes[0]].tolist(), strict=True):
        if start > position:
            break
        position, before = end, f" behind those of rank {rank}"
    else:
        start = spec.offset + spec.num_bytes
    raise RelayError(f"no rank writes elements {_elements(spec, position, start)} of {_describe(spec)}{before}")


def _columns(manifest: Manifest) -> tuple[npt.NDArray[np.int64], ...]:
    """Offset, size and element size of every tensor that has bytes."""
    rows = [(spec.offset, spec.num_bytes, _item_bytes(spec)) for spec in manifest.tensors if spec.num_bytes]
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _item_bytes(spec: TensorSpec) -> int:
    count = 1
    for size in spec.shape:
        count *= size
    return spec.num_bytes // count


def _tensor_at(manifest: Manifest, position: int) -> TensorSpec:
    return next(spec for spec in manifest.tensors if spec.offset <= position < spec.offset + spec.num_bytes)


def _elements(spec: TensorSpec, start: int, end: int) -> str:
    item = _item_bytes(spec)
    return f"{(start - spec.offset) // item} to {(end - spec.offset) // item}"


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name!r} {spec.dtype}{list(spec.shape)}"
