"""A relay's slot seen from a vLLM worker: mapped, its bytes checked, its tensors as views without a copy.

The rollout worker holds the lease for as long as the update takes, so the bytes do not change under the mapping.
"""

import mmap
import os
from typing import Self

import msgspec
import torch

from laminar.workers.relay.digest import DIGEST_BYTES, combine, digest_blocks
from laminar.workers.relay.manifest import BLOCK_BYTES, Manifest, Snapshot, TensorSpec


class Refused(ValueError):
    """A weight version that was not touched: it does not fit, or its bytes are not what they should be."""


class Offer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the client says of a version: the ``check`` of a weight update."""

    version: str
    path: str
    """The slot's file; the version begins at its first byte."""
    digest: str
    manifest: Manifest

    @classmethod
    def parse(cls, fields: object) -> Self:
        """Raises Refused for anything that is not an offer."""
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise Refused(f"not an offer of weights: {error}") from error


class Slot:
    """The mapped bytes of an offer. Raises Refused when there are too few, or the manifest contradicts itself."""

    def __init__(self, offer: Offer) -> None:
        check_manifest(offer.manifest)
        self.offer = offer
        self._mapping = _map(offer.path, offer.manifest.num_bytes)
        self._view = memoryview(self._mapping)
        self.snapshot = Snapshot(offer.manifest, self._view)

    def digests(self, rank: int, world_size: int) -> torch.Tensor:
        """Digests of all blocks, uint8 [blocks * 16], those of other ranks' shares being zero."""
        num_blocks = -(-len(self._view) // BLOCK_BYTES)
        first, stop = num_blocks * rank // world_size, num_blocks * (rank + 1) // world_size
        digests = bytearray(num_blocks * DIGEST_BYTES)
        share = digest_blocks(self._view[first * BLOCK_BYTES : stop * BLOCK_BYTES])
        digests[first * DIGEST_BYTES : stop * DIGEST_BYTES] = share
        return torch.frombuffer(digests, dtype=torch.uint8)

    def check_digest(self, blocks: bytes) -> None:
        """Raises Refused unless the digests of all blocks make the digest that was announced."""
        found = combine(blocks, len(self._view))
        if found != self.offer.digest:
            raise Refused(
                f"digest {found} instead of {self.offer.digest}: the bytes in {self.offer.path} are not {self.offer.version}"
            )

    def close(self) -> None:
        """Unmap, unless a tensor is still seen from somewhere; then the mapping goes with that tensor."""
        try:
            self._view.release()
            self._mapping.close()
        except BufferError:
            pass


def check_manifest(manifest: Manifest) -> None:
    """Raises Refused for tensors that are no weights of floating point, or do not lie where they should."""
    names = {spec.name for spec in manifest.tensors}
    if len(names) != len(manifest.tensors) or manifest.num_bytes < 1:
        raise Refused("the manifest names a tensor twice, or is empty")
    for spec in manifest.tensors:
        if spec.num_bytes != _num_bytes(spec) or not 0 <= spec.offset <= manifest.num_bytes - spec.num_bytes:
            raise Refused(f"the manifest gives {spec.name} bytes that are not its own: {spec}")


def _num_bytes(spec: TensorSpec) -> int:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise Refused(
            f"{spec.name} is {spec.dtype}: vLLM's loader takes weights in float32, bfloat16 or float16 and quantises "
            "them itself where the server is told to"
        )
    return torch.Size(spec.shape).numel() * dtype.itemsize


def _map(path: str, num_bytes: int) -> mmap.mmap:
    """Copy-on-write, so that a loader that writes to what it is given harms nobody but itself."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise Refused(
            f"{path}: {error.strerror}; does vLLM run on the relay's host, with the same /dev/shm?"
        ) from error
    try:
        size = os.fstat(descriptor).st_size
        if size < num_bytes:
            raise Refused(f"{path} has {size} bytes, the version has {num_bytes}")
        return mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
