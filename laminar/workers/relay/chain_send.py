"""The sending half of a link: the newest version that is here or on its way, to the neighbour downstream, chunk by chunk."""

import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from laminar.workers.relay import chain_frames as frames
from laminar.workers.relay import delta
from laminar.workers.relay.chain_store import ChainStore
from laminar.workers.relay.flow import Flow
from laminar.workers.relay.link_speed import LinkSpeed
from laminar.workers.relay.pacing import LinkCost, TokenBucket
from laminar.workers.transport import Link, LinkEnded

OFFER_AGAIN_S = 1.0  # a neighbour whose slots are all leased takes a version later
STARTS = 8  # empty messages by which a new link's start-up time is measured


class Sent:
    """What went downstream so far, over all links of this relay, and how it goes now."""

    def __init__(self) -> None:
        self.version_bytes = self.wire_bytes = 0
        """Of versions; and what was sent for them, which is less with deltas."""
        self.chunk_bytes = 0
        """Of the version that was sent last."""
        self.cost = LinkCost()
        """Of the present link."""
        self.under_way: tuple[Flow, int] | None = None
        """A version, and how many of its bytes the neighbour has."""


class Cut(NamedTuple):
    """How a sender cuts and paces versions."""

    chunk_bytes: int
    """0: what suits the link (`pacing.best_chunk_bytes`)."""
    deltas: str
    num_relays: int
    """Of the chain, for that; 0: not known."""
    bytes_per_s_max: float
    """0: no limit."""


class News:
    """Wakes the sender when there may be another version."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.count = 0

    def tell(self) -> None:
        """There may be one."""
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait(self, count: int, timeout_s: float) -> None:
        """Until there were more than `count`."""
        with self._changed:
            self._changed.wait_for(lambda: self.count != count, timeout_s)


class Sender:
    """Sends over one link until its epoch `is_over`. `on_slow` is called once at most, when the link holds the chain up."""

    def __init__(
        self,
        link: Link,
        store: ChainStore,
        news: News,
        sent: Sent,
        is_over: Callable[[], bool],
        on_slow: Callable[[], None],
        cut: Cut,
        speed: LinkSpeed,
    ) -> None:
        self._link, self._store, self._news, self._sent, self._is_over = link, store.behind(link), news, sent, is_over
        self._on_slow, self._speed = on_slow, speed
        self._cut, self._bucket, self._pace = cut, TokenBucket(cut.bytes_per_s_max), delta.Pace(cut.deltas)
        self._incoming = frames.Frames(link)

    def run(self) -> None:
        """The newest version, again and again. Raises LinkEnded; ProtocolError for a peer that does not keep to the rules."""
        self._sent.cost = LinkCost()
        self._sent.cost.started([_clocked(lambda: frames.send_nothing(self._link)) for _ in range(STARTS)])
        offered, offer_again_at = None, 0.0
        while not self._is_over():
            count = self._news.count
            with self._store.held(self._store.newest()) as flow:
                is_due = flow is not None and (flow.version != offered or time.monotonic() > offer_again_at)
                if flow is not None and is_due:
                    offer_again_at = math.inf if self._send(flow) else time.monotonic() + OFFER_AGAIN_S
                    offered = None if flow.lost else flow.version  # what was lost may be published again
            if not is_due:
                self._news.wait(count, frames.SIGN_OF_LIFE_S)
                frames.send_nothing(self._link)

    def _send(self, flow: Flow) -> bool:
        """Whether the neighbour has it now, or what there was of it."""
        frames.send(self._link, frames.Offer(version=flow.version, manifest=flow.manifest))
        have = self._incoming.expect(frames.Have)
        assert isinstance(have, frames.Have)
        if have.offset < 0:
            return False
        if not have.complete:
            with self._store.held(self._store.ready(have.base) if have.base else None) as base:
                try:
                    self._send_rest(flow, base, have.offset)
                finally:
                    self._sent.under_way = None
            self._send_end(flow)
        return True

    def _send_rest(self, flow: Flow, base: Flow | None, start: int) -> None:
        """Chunks from `start` on, as they arrive here, each whole or as a delta to `base`."""
        chunk_bytes = self._chunk_bytes(flow.num_bytes)
        while start < flow.num_bytes and not flow.lost:
            self._check_epoch()
            end = min(start + chunk_bytes, flow.num_bytes)
            self._sent.under_way = flow, start
            if (wait_s := self._bucket.wait_s()) > 0:
                time.sleep(min(wait_s, frames.SIGN_OF_LIFE_S))
                frames.send_nothing(self._link)
            elif flow.wait_for(end, frames.SIGN_OF_LIFE_S) < end:
                frames.send_nothing(self._link)
            elif flow.is_at_rest and not flow.is_intact(start, end):
                self._store.discard(flow)
            else:
                wire_bytes = self._send_chunk(flow, base, start, end)
                self._bucket.spend(wire_bytes)
                self._sent.wire_bytes += wire_bytes
                self._sent.version_bytes += end - start
                start = end

    def _chunk_bytes(self, num_bytes: int) -> int:
        """For a version of this size."""
        chosen = self._cut.chunk_bytes or self._sent.cost.best_chunk_bytes(num_bytes, self._cut.num_relays)
        self._sent.chunk_bytes = chosen
        return chosen

    def _send_chunk(self, flow: Flow, base: Flow | None, start: int, end: int) -> int:
        """Bytes that it took."""
        part, began = flow.buffer[start:end], time.perf_counter()
        made = None
        as_delta = base is not None and part.nbytes % delta.WORD_BYTES == 0 and self._pace.prefers_delta()
        if as_delta and base is not None:
            made = delta.encode(part, base.buffer[start:end], flow.manifest.item_bytes)
        num_bytes, digests = part.nbytes if made is None else len(made), flow.digests(start, end)
        if made is None:
            sent_s = _clocked(lambda: frames.send_bytes(self._link, start, part, digests))
            self._sent.cost.took(num_bytes, sent_s)
        else:
            sent_s = _clocked(lambda: frames.send_delta(self._link, start, made, digests))
        took_s = max(time.perf_counter() - began, self._bucket.takes_s(num_bytes))
        self._pace.took(part.nbytes, took_s, as_delta=as_delta)
        if self._speed.sent(num_bytes, sent_s):
            self._on_slow()
        return num_bytes

    def _send_end(self, flow: Flow) -> None:
        """The digest, once it is known, and the neighbour's word on it."""
        while not flow.digest and not flow.lost:
            self._check_epoch()
            flow.wait_for_end(frames.SIGN_OF_LIFE_S)
            frames.send_nothing(self._link)
        self._check_epoch()
        frames.send(self._link, frames.End(version=flow.version, digest=flow.digest, canary=flow.canary))
        done = self._incoming.expect(frames.Done)
        assert isinstance(done, frames.Done)
        if not done.verified and flow.digest:
            raise LinkEnded(f"{self._link.peer} received {flow.version} with wrong bytes")

    def _check_epoch(self) -> None:
        """Raises LinkEnded once it is over: what is unfinished the next link finishes, which an `End` would have begin again."""
        if self._is_over():
            raise LinkEnded("the epoch is over")


def _clocked(work: Callable[[], None]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
