"""The receiving half of a link: versions from the neighbour upstream, into slots.

Invariant: what is written lies behind everything that was received before, and is checked block by block as it comes.
"""

import time
from collections.abc import Callable

from laminar.errors import ProtocolError
from laminar.workers.relay import chain_frames as frames
from laminar.workers.relay import delta
from laminar.workers.relay.chain_store import ChainStore
from laminar.workers.relay.digest import DIGEST_BYTES
from laminar.workers.relay.flow import Flow
from laminar.workers.relay.link_speed import Fastest
from laminar.workers.relay.manifest import BLOCK_BYTES
from laminar.workers.transport import Link, LinkEnded


class Receiver:
    """Takes what comes over one link until it ends. `is_over` = its epoch is; `on_flow` is called when a version begins to come."""

    def __init__(
        self,
        link: Link,
        incoming: frames.Frames,
        store: ChainStore,
        is_over: Callable[[], bool],
        on_flow: Callable[[], None],
        fastest: Fastest,
    ) -> None:
        self._link, self._incoming, self._store = link, incoming, store.behind(link)
        self._is_over, self._on_flow, self._fastest = is_over, on_flow, fastest

    def run(self) -> None:
        """Offers, one after another. Ends with LinkEnded, or ProtocolError for a peer that does not keep to the rules."""
        while True:
            offer = self._incoming.expect(frames.Offer)
            assert isinstance(offer, frames.Offer)
            flow = self._store.accept(offer.version, offer.manifest)
            if flow is None or flow.digest:
                offset, complete = (-1, False) if flow is None else (flow.received, True)
                frames.send(self._link, frames.Have(version=offer.version, offset=offset, complete=complete))
            else:
                self._on_flow()
                self._take(flow)

    def _take(self, flow: Flow) -> None:
        """The rest of one version, in part as deltas to the newest that is here, if that has the same layout."""
        with self._store.held(self._store.ready(None)) as newest:
            can_rebuild = newest is not None and newest.manifest == flow.manifest and not flow.is_whole_only
            base = newest if can_rebuild else None
            have = frames.Have(version=flow.version, offset=flow.received, base=base.version if base else None)
            frames.send(self._link, have)
            began, num_bytes = time.monotonic(), 0
            while isinstance(said := self._incoming.next(), frames.Chunk):
                num_bytes += said.length
                if said.is_delta:
                    self._take_delta(flow, base, said)
                else:
                    self._take_chunk(flow, said)
        if not isinstance(said, frames.End) or said.version != flow.version:
            raise ProtocolError(f"{self._link.peer} sent {said!r} in the middle of {flow.version}")
        self._fastest.saw(num_bytes, time.monotonic() - began)
        self._take_end(flow, said)

    def _take_chunk(self, flow: Flow, chunk: frames.Chunk) -> None:
        end = self._checked_end(flow, chunk, chunk.length)
        while flow.received < end:
            block = flow.next_block()
            self._link.receive_into(block)
            self._advance(flow, block, chunk)

    def _take_delta(self, flow: Flow, base: Flow | None, chunk: frames.Chunk) -> None:
        if base is None or chunk.length > flow.num_bytes:
            raise ProtocolError(f"{self._link.peer} sent a delta of {chunk.length} bytes to a base that was not named")
        made = bytearray(chunk.length)
        self._link.receive_into(memoryview(made))
        end = self._checked_end(flow, chunk, delta.num_bytes_of(made))
        place = flow.buffer[chunk.offset : end]
        place[:] = base.buffer[chunk.offset : end]
        delta.apply(made, place, flow.manifest.item_bytes)
        try:
            while flow.received < end:
                self._advance(flow, flow.next_block(), chunk)
        except ProtocolError:
            flow.is_whole_only = True
            raise

    def _take_end(self, flow: Flow, end: frames.End) -> None:
        verified = flow.verifies(end.digest)
        if verified:
            self._store.finish(flow, end.digest, end.canary)
        elif self._is_over():
            raise LinkEnded("the epoch is over")  # the next upstream goes on where this one stopped
        else:
            self._store.lose(flow, "its bytes do not have the master's digest" if end.digest else "lost upstream")
        frames.send(self._link, frames.Done(version=flow.version, verified=verified))

    def _advance(self, flow: Flow, block: memoryview, chunk: frames.Chunk) -> None:
        if self._is_over():
            raise LinkEnded("the epoch is over")
        at = (flow.received - chunk.offset) // BLOCK_BYTES * DIGEST_BYTES
        flow.advance(block, chunk.digests[at : at + DIGEST_BYTES])

    def _checked_end(self, flow: Flow, chunk: frames.Chunk, length: int) -> int:
        """End of a chunk of so many bytes. Raises ProtocolError unless it is the next one and ends with a block."""
        start, end = chunk.offset, chunk.offset + length
        if start != flow.received or end > flow.num_bytes or (end % BLOCK_BYTES and end != flow.num_bytes):
            raise ProtocolError(
                f"{self._link.peer} sent bytes {start} to {end} of {flow.version}; due are whole blocks from {flow.received} "
                f"to {flow.num_bytes}"
            )
        return end
