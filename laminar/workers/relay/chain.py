"""This relay's two links of the chain: versions come from the neighbour upstream and go on downstream as they arrive.

Threads: one listens; one per accepted link receives; one per epoch sends. The order of the chain comes from the controller; a link
that breaks is reported at once, and the next epoch's links go on from the byte that the receiver has.

Invariants:
* Only a link of the present epoch, from the neighbour that the controller named, may write to a slot.
* Every wait on a peer ends within the transport's progress deadline, or because the peer gives signs of life.
* A version is READY here only with the digest that came from the master.
"""

import contextlib
import hmac
import math
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeVar

import structlog

from laminar.errors import LaminarError, ProtocolError
from laminar.ids import Version
from laminar.wire import Neighbour
from laminar.workers.canary import Canary
from laminar.workers.relay import chain_frames as frames
from laminar.workers.relay.flow import Flow
from laminar.workers.relay.manifest import Manifest
from laminar.workers.transport import Link, LinkEnded, Transport

log = structlog.get_logger("laminar.relay.chain")

SIGN_OF_LIFE_S = 0.1  # a fifth of the default progress deadline
RETRY_S = 0.01  # for a neighbour that has not heard of the epoch yet: the controller told it in the same instant
CONNECT_TIMEOUT_S = 3.0  # for that neighbour, and for a first connection; a dead process refuses at once
CHUNK_BYTES = 1 << 20  # starting a send costs next to nothing here, so the smallest is the best: docs/relays.md
OFFER_AGAIN_S = 1.0  # a neighbour whose slots are all leased takes a version later
LINKS_MAX = 32  # accepted at a time; one is in use, others are old ones that end or strangers that fail their proof

_Result = TypeVar("_Result")


class Place(NamedTuple):
    """How a relay takes part in a chain."""

    name: str
    token: str
    """The run's: links are authenticated with it."""
    transport: Transport
    host: str
    """Address to listen on."""
    port: int = 0
    """0 = any free one."""
    chunk_bytes: int = CHUNK_BYTES
    """Bytes are forwarded by so many, a multiple of a digest block."""


class Store(Protocol):
    """What the chain asks of the relay's slots; from any thread."""

    def newest(self) -> tuple[Flow, int] | None:
        """The newest version that is here or on its way, held under a lease until `release`."""

    def release(self, lease: int) -> None: ...

    def accept(self, version: Version, manifest: Manifest) -> "Future[Flow | None]":
        """Where to put a version, or what is here of it. None: no place for it, or it was here and went."""

    def finish(self, flow: Flow, digest: str, canary: Canary | None) -> None:
        """It is complete and verified: let readers in."""

    def lose(self, flow: Flow, reason: str) -> None:
        """It will never be complete."""

    def lose_incoming(self) -> None:
        """What was coming from upstream will not come."""


class Chain:
    """`on_broken(peer, epoch)` is called from a thread, at most once per link."""

    def __init__(self, place: Place, store: Store, on_broken: Callable[[str, int], None]) -> None:
        """Raises StartError when it cannot listen."""
        self._name, self._token, self._transport = place.name, place.token, place.transport
        self._store, self._on_broken, self._chunk_bytes = store, on_broken, place.chunk_bytes
        self._listener = place.transport.listen(place.host, place.port)
        self.port = self._listener.port
        self._news = threading.Condition()
        """Guards what follows; notified at a new epoch and when the store has something new."""
        self._epoch = 0
        self._upstream: str | None = None
        self._downstream: Neighbour | None = None
        self._receiving_turn = threading.Lock()
        """Held by the one thread that may write what comes from upstream."""
        self._receiving: Link | None = None
        self._sending: Link | None = None
        self._num_links = 0
        self._closed = False
        self._num_news = 0
        self._start(self._listen, "chain-listen")

    @property
    def epoch(self) -> int:
        """Of the present chain; 0 = none yet."""
        return self._epoch

    def arrange(self, epoch: int, upstream: str | None, downstream: Neighbour | None) -> None:
        """Connect anew. What an older epoch's links do from now on has no effect; an older epoch is ignored."""
        with self._news:
            if epoch <= self._epoch or self._closed:
                return
            self._epoch, self._upstream, self._downstream = epoch, upstream, downstream
            old = [link for link in (self._receiving, self._sending) if link is not None]
            self._receiving = self._sending = None
            self._news.notify_all()
        for link in old:
            link.close()
        if downstream is not None:
            self._start(lambda: self._send_for(epoch, downstream), f"chain-send-{epoch}")
        if upstream is None:
            self._start(self._lose_incoming, f"chain-first-{epoch}")

    def wake(self) -> None:
        """The store has a version that it had not."""
        with self._news:
            self._num_news += 1
            self._news.notify_all()

    def close(self) -> None:
        """End all links. Threads end soon after."""
        with self._news:
            self._closed = True
            links = [link for link in (self._receiving, self._sending) if link is not None]
            self._news.notify_all()
        self._listener.close()
        for link in links:
            link.close()

    def _is_current(self, epoch: int) -> bool:
        return epoch == self._epoch and not self._closed

    def _start(self, work: Callable[[], None], name: str) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    def _broken(self, peer: str, epoch: int, error: BaseException) -> None:
        if self._is_current(epoch):
            log.warning("chain_link_broken", peer=peer, epoch=epoch, reason=str(error))
            self._on_broken(peer, epoch)

    # ---- from upstream -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        with contextlib.suppress(LinkEnded):
            while True:
                link = self._listener.accept()
                with self._news:
                    welcome = self._num_links < LINKS_MAX and not self._closed
                    self._num_links += welcome
                if welcome:
                    self._start(lambda link=link: self._receive(link), "chain-receive")  # type: ignore[misc]
                else:
                    link.close()

    def _receive(self, link: Link) -> None:
        """One accepted link, to its end."""
        hello = None
        try:
            incoming = frames.Frames(link)
            hello = self._admit(link, incoming)
            if hello is not None:
                with self._receiving_turn:  # its last holder's link is closed: that thread is on its way out
                    self._take_versions(link, incoming, hello.epoch)
        except (LinkEnded, LaminarError) as error:
            if hello is not None:
                self._broken(hello.name, hello.epoch, error)
            else:
                log.info("chain_stranger", peer=link.peer, reason=str(error))
        finally:
            link.close()
            with self._news:
                self._num_links -= 1

    def _admit(self, link: Link, incoming: frames.Frames) -> frames.Hello | None:
        """The other end's Hello if it is this epoch's upstream; it gets an answer in any case."""
        hello = incoming.expect(frames.Hello)
        assert isinstance(hello, frames.Hello)
        nonce = secrets.token_bytes(frames.NONCE_BYTES)
        frames.send(link, frames.Challenge(proof=frames.proof(self._token, "downstream", hello, nonce), nonce=nonce))
        answer = incoming.expect(frames.Proof)
        assert isinstance(answer, frames.Proof)
        if not hmac.compare_digest(answer.proof, frames.proof(self._token, "upstream", hello, nonce)):
            raise ProtocolError(f"{link.peer} does not know the run's token")
        with self._news:
            refusal = self._refusal(hello)
            if refusal is None:
                former, self._receiving = self._receiving, link
        if refusal is not None:
            frames.send(link, refusal)
            return None
        if former is not None:
            former.close()
        frames.send(link, frames.Welcome())
        return hello

    def _refusal(self, hello: frames.Hello) -> frames.Refused | None:
        if hello.epoch > self._epoch:
            return frames.Refused(reason=f"{self._name} has not heard of epoch {hello.epoch}", early=True)
        if hello.epoch < self._epoch or self._closed:
            return frames.Refused(reason=f"epoch {hello.epoch} is over, the chain is {self._epoch}")
        if hello.name != self._upstream:
            return frames.Refused(reason=f"{self._upstream} is upstream in epoch {hello.epoch}, not {hello.name}")
        return None

    def _lose_incoming(self) -> None:
        with self._receiving_turn:
            self._store.lose_incoming()

    def _take_versions(self, link: Link, incoming: frames.Frames, epoch: int) -> None:
        """Offers, one after another, until the link ends."""
        while True:
            offer = incoming.expect(frames.Offer)
            assert isinstance(offer, frames.Offer)
            flow = _patiently(link, self._store.accept(offer.version, offer.manifest))
            offset = -1 if flow is None else flow.received
            complete = flow is not None and flow.digest != ""
            frames.send(link, frames.Have(version=offer.version, offset=offset, complete=complete))
            if flow is None or flow.digest:
                continue
            self.wake()
            self._take_bytes(link, incoming, flow, epoch)

    def _take_bytes(self, link: Link, incoming: frames.Frames, flow: Flow, epoch: int) -> None:
        """The rest of one version."""
        while not isinstance(said := incoming.next(), frames.End):
            if not isinstance(said, tuple):
                raise ProtocolError(f"{link.peer} sent {said!r} in the middle of {flow.version}")
            self._take_chunk(link, flow, epoch, *said)
        if said.version != flow.version:
            raise ProtocolError(f"{link.peer} ended {said.version} in the middle of {flow.version}")
        verified = flow.verifies(said.digest)
        if verified:
            self._store.finish(flow, said.digest, said.canary)
        else:
            self._store.lose(flow, "its bytes do not have the master's digest" if said.digest else "lost upstream")
        frames.send(link, frames.Done(version=flow.version, verified=verified))

    def _take_chunk(self, link: Link, flow: Flow, epoch: int, offset: int, length: int) -> None:
        if offset != flow.received or offset + length > flow.num_bytes:
            raise ProtocolError(
                f"{link.peer} sent bytes {offset} to {offset + length} of {flow.version}; due are those from {flow.received} "
                f"to {flow.num_bytes}"
            )
        end = offset + length
        while flow.received < end:
            block = flow.next_block()
            if flow.received + block.nbytes > end:
                raise ProtocolError(f"{link.peer} sent a chunk of {flow.version} that ends at {end}, within a block")
            link.receive_into(block)
            if not self._is_current(epoch):
                raise LinkEnded(f"epoch {epoch} is over")
            flow.advance(block)

    # ---- downstream ----------------------------------------------------------------------------------------

    def _send_for(self, epoch: int, peer: Neighbour) -> None:
        """The sending link of one epoch, to its end."""
        link = None
        try:
            link = self._connect(epoch, peer)
            if link is not None:
                self._send_versions(link, epoch)
        except (LinkEnded, LaminarError) as error:
            self._broken(peer.name, epoch, error)
        finally:
            if link is not None:
                link.close()

    def _connect(self, epoch: int, peer: Neighbour) -> Link | None:
        """The link, once the neighbour welcomes it; None if the epoch is over before."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while self._is_current(epoch):
            link = self._transport.connect(peer.host, peer.port, CONNECT_TIMEOUT_S)
            refusal = self._introduce(link, epoch)
            if refusal is None:
                with self._news:
                    if self._is_current(epoch):
                        self._sending = link
                        return link
            link.close()
            if refusal is not None and (not refusal.early or time.monotonic() > deadline):
                raise LinkEnded(f"{peer.name} refused the link: {refusal.reason}")
            time.sleep(RETRY_S)
        return None

    def _introduce(self, link: Link, epoch: int) -> frames.Refused | None:
        incoming = frames.Frames(link)
        hello = frames.Hello(name=self._name, epoch=epoch, nonce=secrets.token_bytes(frames.NONCE_BYTES))
        frames.send(link, hello)
        challenge = incoming.expect(frames.Challenge)
        assert isinstance(challenge, frames.Challenge)
        if not hmac.compare_digest(challenge.proof, frames.proof(self._token, "downstream", hello, challenge.nonce)):
            raise ProtocolError(f"{link.peer} does not know the run's token")
        frames.send(link, frames.Proof(proof=frames.proof(self._token, "upstream", hello, challenge.nonce)))
        answer = incoming.expect(frames.Welcome, frames.Refused)
        return answer if isinstance(answer, frames.Refused) else None

    def _send_versions(self, link: Link, epoch: int) -> None:
        """The newest version, again and again, while the epoch lasts."""
        incoming = frames.Frames(link)
        offered, offer_again_at = None, 0.0
        while self._is_current(epoch):
            num_news = self._num_news
            newest = self._store.newest()
            if newest is not None:
                flow, lease = newest
                try:
                    if flow.version != offered or time.monotonic() > offer_again_at:
                        offered = flow.version
                        taken = self._send_version(link, incoming, flow, epoch)
                        offer_again_at = math.inf if taken else time.monotonic() + OFFER_AGAIN_S
                        continue
                finally:
                    self._store.release(lease)
            with self._news:
                if num_news == self._num_news and self._is_current(epoch):
                    self._news.wait(SIGN_OF_LIFE_S)
            frames.send_nothing(link)

    def _send_version(self, link: Link, incoming: frames.Frames, flow: Flow, epoch: int) -> bool:
        """Whether the neighbour has it now, or what there was of it."""
        frames.send(link, frames.Offer(version=flow.version, manifest=flow.manifest))
        have = incoming.expect(frames.Have)
        assert isinstance(have, frames.Have)
        if have.offset < 0:
            return False
        if have.offset < flow.num_bytes or not have.complete:
            self._send_rest(link, incoming, flow, epoch, have.offset)
        return True

    def _send_rest(self, link: Link, incoming: frames.Frames, flow: Flow, epoch: int, sent: int) -> None:
        while sent < flow.num_bytes and not flow.lost and self._is_current(epoch):
            end = min(sent + self._chunk_bytes, flow.num_bytes)
            if flow.wait_for(end, SIGN_OF_LIFE_S) < end:
                frames.send_nothing(link)
            else:
                frames.send_bytes(link, sent, flow.buffer[sent:end])
                sent = end
        while not flow.digest and not flow.lost and self._is_current(epoch):
            flow.wait_for_end(SIGN_OF_LIFE_S)
            frames.send_nothing(link)
        frames.send(link, frames.End(version=flow.version, digest=flow.digest, canary=flow.canary))
        done = incoming.expect(frames.Done)
        assert isinstance(done, frames.Done)
        if not done.verified and flow.digest:
            raise LinkEnded(f"{link.peer} received {flow.version} with wrong bytes")


def _patiently(link: Link, future: "Future[_Result]") -> _Result:
    """The result, with signs of life until it is there: backing the first slot with memory may take minutes."""
    while True:
        try:
            return future.result(SIGN_OF_LIFE_S)
        except TimeoutError:
            frames.send_nothing(link)
