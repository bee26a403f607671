"""The layout of one weight version: a flat byte range with tensors at 256-byte boundaries."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

ALIGN = 256
BLOCK_BYTES = 1 << 20
"""Digests are xxh3 per block of this size, combined; chunks on the wire are whole blocks."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: where its contiguous bytes lie."""

    name: str
    dtype: str
    """torch's name without the prefix: ``float32``, ``bfloat16``, …"""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """All tensors of a model, in order, and the size of the whole range."""

    tensors: tuple[TensorSpec, ...]
    num_bytes: int

    @property
    def item_bytes(self) -> int:
        """Size of most elements: 4 or 2."""
        wide = sum(spec.num_bytes for spec in self.tensors if spec.dtype in ("float32", "int32"))
        return 4 if 2 * wide > self.num_bytes else 2

    def difference(self, other: "Manifest") -> str:
        """What is different in `other`, which is not equal."""
        for ours, theirs in zip(self.tensors, other.tensors, strict=False):
            if ours != theirs:
                return f"tensor {_describe(theirs)} instead of {_describe(ours)}"
        many, few = len(other.tensors), len(self.tensors)
        return f"{many} tensors in {other.num_bytes} bytes instead of {few} in {self.num_bytes}"

    @classmethod
    def plan(cls, tensors: list[tuple[str, str, tuple[int, ...], int]]) -> "Manifest":
        """Lay out (name, dtype, shape, item size in bytes) one after another."""
        specs, offset = [], 0
        for name, dtype, shape, item_bytes in tensors:
            num_bytes = item_bytes
            for size in shape:
                num_bytes *= size
            specs.append(TensorSpec(name, dtype, shape, offset, num_bytes))
            offset += -(-num_bytes // ALIGN) * ALIGN
        return cls(tuple(specs), offset)


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name!r} {spec.dtype}{list(spec.shape)} at byte {spec.offset}"


class Snapshot:
    """A leased, complete version: read-only views of its tensors, no copy. Valid until the lease is released.

    `path` is the file whose first bytes are the version, for another process to map; None = in this process's memory only.
    """

    def __init__(self, manifest: Manifest, buffer: memoryview, *, path: Path | None = None, digest: str = "") -> None:
        self.manifest = manifest
        self.path = path
        self.digest = digest
        self._buffer = buffer

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """(name, view) in manifest order. Copy what must outlive the lease; never write."""
        import torch

        for spec in self.manifest.tensors:
            if spec.num_bytes == 0:
                yield spec.name, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
                continue
            part = self._buffer[spec.offset : spec.offset + spec.num_bytes]
            yield spec.name, torch.frombuffer(part, dtype=getattr(torch, spec.dtype)).view(spec.shape)
