"""This relay's two links of the chain: versions come from the neighbour upstream and go on downstream as they arrive.

Threads: one listens; one per accepted link receives; one per epoch sends. The order of the chain comes from the controller; a link
that breaks is reported at once, and the next epoch's links go on from the byte that the receiver has.

The same listener takes shard links, over which ranks of several hosts fill one version; what goes wrong with these costs that
version (`Versions`), and says nothing about the chain.

Invariants:
* Only a link of the present epoch, from the neighbour that the controller named, may write to a slot; or one of a publication
  that is being collected here, to the bytes that its ranks announced.
* Every wait on a peer ends within the transport's progress deadline, unless it gives signs of life; these count only of one that
  has proved who it is.
* A version is READY here only with the digest that came from the master.
"""

import contextlib
import hmac
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

import structlog

from laminar.errors import LaminarError, ProtocolError
from laminar.wire import Neighbour
from laminar.workers.relay import chain_frames as frames
from laminar.workers.relay.chain_receive import Receiver
from laminar.workers.relay.chain_send import Cut, News, Sender, Sent
from laminar.workers.relay.chain_store import ChainStore
from laminar.workers.relay.link_speed import Fastest, LinkSpeed
from laminar.workers.relay.manifest import BLOCK_BYTES
from laminar.workers.relay.shards import Outgoing
from laminar.workers.relay.shards_receive import ShardReceiver
from laminar.workers.relay.shards_send import ShardSender
from laminar.workers.transport import Link, LinkEnded, Transport

log = structlog.get_logger("laminar.relay.chain")

RETRY_S = 0.01  # for a neighbour that has not heard of the epoch yet: the controller told it in the same instant
HANDSHAKE_S = 30.0  # it takes milliseconds; a stranger that says just enough not to be silent ends there
CONNECT_TIMEOUT_S = 3.0  # for that neighbour, and for a first connection; a dead process refuses at once
LINKS_MAX = 1024  # accepted at a time: one of the chain, one per other trainer host and version, old ones, strangers


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
    chunk_bytes: int = BLOCK_BYTES
    """Bytes are forwarded by so many, a multiple of a digest block; 0 = by what suits the link and the chain."""
    bytes_per_s_max: float = 0.0
    """Of the link downstream; 0 = no limit."""
    deltas: str = "auto"
    """``auto``: where they are faster; ``always``, ``never``."""


class Chain:
    """`on_broken(peer, epoch)` and `on_slow(peer, epoch)` are called from threads, each at most once per link."""

    def __init__(
        self,
        place: Place,
        store: ChainStore,
        on_broken: Callable[[str, int], None],
        on_slow: Callable[[str, int], None],
    ) -> None:
        """Raises StartError when it cannot listen."""
        self._name, self._token, self._transport = place.name, place.token, place.transport
        self._store, self._on_broken, self._on_slow = store, on_broken, on_slow
        self._place = place
        self.sent = Sent()
        self._news = News()
        self._fastest = Fastest()
        self._listener = place.transport.listen(place.host, place.port)
        self.port = self._listener.port
        self._lock = threading.Lock()
        """Guards what follows."""
        self._epoch = self._num_relays = 0
        self._upstream: str | None = None
        self._receiving_turn = threading.Lock()
        """Held by the one thread that may write what comes from upstream."""
        self._receiving: Link | None = None
        self._sending: Link | None = None
        self._sending_turn = threading.Lock()
        """Held by the thread that sends shards: one version after another."""
        self._num_links = 0
        self._closed = False
        self._start(self._listen, "chain-listen")

    @property
    def epoch(self) -> int:
        """Of the present chain; 0 = none yet."""
        return self._epoch

    @property
    def transport(self) -> str:
        """Its name, and what the links of the present epoch really move bytes over, else what it may."""
        with self._lock:
            links = [link for link in (self._receiving, self._sending) if link is not None]
        media = dict.fromkeys(link.medium for link in links) or [self._transport.medium]
        return f"{self._transport.name} over {' and '.join(media)}"

    def arrange(self, epoch: int, upstream: str | None, downstream: Neighbour | None, num_relays: int = 0) -> None:
        """Connect anew. What an older epoch's links do from now on has no effect; an older epoch is ignored.

        `num_relays`: length of the chain, 0 = not known.
        """
        with self._lock:
            if epoch <= self._epoch or self._closed:
                return
            self._epoch, self._upstream, self._num_relays = epoch, upstream, num_relays
            old = [link for link in (self._receiving, self._sending) if link is not None]
            self._receiving = self._sending = None
        for link in old:
            link.close()
        self.wake()
        if downstream is not None:
            self._start(lambda: self._send_for(epoch, downstream), f"chain-send-{epoch}")
        if upstream is None:
            self._start(lambda: self._lose_incoming(epoch), f"chain-first-{epoch}")

    def send_shards(self, shards: Outgoing) -> None:
        """Send them to the relay that collects them; the store is told the end."""
        self._start(lambda: self._send_shards(shards), f"chain-shards-{shards.publication}")

    def wake(self) -> None:
        """The store has a version that it had not."""
        self._news.tell()

    def close(self) -> None:
        """End all links. Threads end soon after."""
        with self._lock:
            self._closed = True
            links = [link for link in (self._receiving, self._sending) if link is not None]
        self._listener.close()
        for link in links:
            link.close()
        self.wake()

    def _is_current(self, epoch: int) -> bool:
        return epoch == self._epoch and not self._closed

    def _start(self, work: Callable[[], None], name: str) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    def _broken(self, peer: str, epoch: int, error: BaseException) -> None:
        if not isinstance(error, LinkEnded | LaminarError):
            log.error("chain_thread_failed", peer=peer, epoch=epoch, trace="".join(traceback.format_exception(error)))
        if self._is_current(epoch):
            log.warning("chain_link_broken", peer=peer, epoch=epoch, reason=str(error) or repr(error))
            self._on_broken(peer, epoch)

    def _slow(self, peer: str, epoch: int) -> None:
        if self._is_current(epoch):
            log.warning("chain_link_slow", peer=peer, epoch=epoch)
            self._on_slow(peer, epoch)

    # ---- from upstream -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        with contextlib.suppress(LinkEnded):
            while True:
                link = self._listener.accept()
                with self._lock:
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
            with _in_time(link):
                hello = self._admit(link, incoming)
                if hello is not None:
                    self._promote(link, hello.name, hello.epoch)
            if hello is not None and hello.publication:
                ShardReceiver(link, incoming, self._store, hello.publication).run()
            elif hello is not None:
                self._take_turn(link)
                try:
                    self._receiver(link, incoming, hello.epoch).run()
                finally:
                    self._receiving_turn.release()
        except Exception as error:  # noqa: BLE001 - whatever it was, this link carries nothing any more, and others must know
            if hello is not None and not hello.publication:
                self._broken(hello.name, hello.epoch, error)
            elif hello is not None:
                log.info("chain_shards_ended", peer=hello.name, publication=hello.publication, reason=str(error))
            else:
                log.info("chain_stranger", peer=link.peer, reason=str(error))
        finally:
            link.close()
            with self._lock:
                self._num_links -= 1

    def _take_turn(self, link: Link) -> None:
        """Its last holder's link is closed, so that thread is on its way out. Raises LinkEnded."""
        while not self._receiving_turn.acquire(timeout=frames.SIGN_OF_LIFE_S):
            frames.send_nothing(link)

    def _admit(self, link: Link, incoming: frames.Frames) -> frames.Hello | None:
        """The other end's Hello if it is this epoch's upstream, or has shards to send; it gets an answer in any case."""
        hello = incoming.expect(frames.Hello)
        assert isinstance(hello, frames.Hello)
        nonce = secrets.token_bytes(frames.NONCE_BYTES)
        frames.send(link, frames.Challenge(proof=frames.proof(self._token, "downstream", hello, nonce), nonce=nonce))
        answer = incoming.expect(frames.Proof)
        assert isinstance(answer, frames.Proof)
        if not hmac.compare_digest(answer.proof, frames.proof(self._token, "upstream", hello, nonce)):
            raise ProtocolError(f"{link.peer} does not know the run's token")
        refusal = self._refusal_of_shards(hello) if hello.publication else self._replace_upstream(link, hello)
        if refusal is not None:
            frames.send(link, refusal)
            return None
        frames.send(link, frames.Welcome())
        return hello

    def _promote(self, link: Link, peer: str, epoch: int) -> None:
        """Both ends have proved who they are."""
        link.promote()
        log.info("chain_link", peer=peer, epoch=epoch, transport=self._transport.name, medium=link.medium)

    def _replace_upstream(self, link: Link, hello: frames.Hello) -> frames.Refused | None:
        """From now on this link is the one from upstream, unless it is refused."""
        with self._lock:
            refusal = self._refusal(hello)
            if refusal is not None:
                return refusal
            former, self._receiving = self._receiving, link
        if former is not None:
            former.close()
        return None

    def _refusal_of_shards(self, hello: frames.Hello) -> frames.Refused | None:
        refused = self._store.refusal(hello.publication)
        return frames.Refused(reason=refused[0], early=refused[1]) if refused else None

    def _refusal(self, hello: frames.Hello) -> frames.Refused | None:
        if hello.epoch > self._epoch:
            return frames.Refused(reason=f"{self._name} has not heard of epoch {hello.epoch}", early=True)
        if hello.epoch < self._epoch or self._closed:
            return frames.Refused(reason=f"epoch {hello.epoch} is over, the chain is {self._epoch}")
        if hello.name != self._upstream:
            return frames.Refused(reason=f"{self._upstream} is upstream in epoch {hello.epoch}, not {hello.name}")
        return None

    def _receiver(self, link: Link, incoming: frames.Frames, epoch: int) -> Receiver:
        return Receiver(link, incoming, self._store, lambda: not self._is_current(epoch), self.wake, self._fastest)

    def _lose_incoming(self, epoch: int) -> None:
        with self._receiving_turn, contextlib.suppress(LinkEnded):  # the relay stops
            if self._is_current(epoch):
                self._store.lose_incoming()

    # ---- downstream ----------------------------------------------------------------------------------------

    def _send_for(self, epoch: int, peer: Neighbour) -> None:
        """The sending link of one epoch, to its end."""
        link = None
        try:
            link = self._connect(peer, epoch, 0, lambda: not self._is_current(epoch))
            if link is not None and self._replace_downstream(link, epoch):
                self._promote(link, peer.name, epoch)
                self._sender(link, peer.name, epoch).run()
        except Exception as error:  # noqa: BLE001 - as in `_receive`
            self._broken(peer.name, epoch, error)
        finally:
            if link is not None:
                link.close()

    def _sender(self, link: Link, peer: str, epoch: int) -> Sender:
        place = self._place
        return Sender(
            link,
            self._store,
            self._news,
            self.sent,
            lambda: not self._is_current(epoch),
            lambda: self._slow(peer, epoch),
            Cut(place.chunk_bytes, place.deltas, self._num_relays, place.bytes_per_s_max),
            LinkSpeed(self._fastest),
        )

    def _replace_downstream(self, link: Link, epoch: int) -> bool:
        """From now on this link is the one to downstream, unless the epoch is over."""
        with self._lock:
            if self._is_current(epoch):
                self._sending = link
            return self._sending is link

    def _connect(self, peer: Neighbour, epoch: int, publication: int, is_over: Callable[[], bool]) -> Link | None:
        """The link, once the other relay welcomes it; None if it is of no use any more before."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not is_over():
            link = self._transport.connect(peer.host, peer.port, CONNECT_TIMEOUT_S)
            try:
                with _in_time(link):
                    refusal = self._introduce(link, epoch, publication)
            except BaseException:
                link.close()
                raise
            if refusal is None:
                return link
            link.close()
            if not refusal.early or time.monotonic() > deadline:
                raise LinkEnded(f"{peer.name} refused the link: {refusal.reason}")
            time.sleep(RETRY_S)
        return None

    def _introduce(self, link: Link, epoch: int, publication: int) -> frames.Refused | None:
        incoming = frames.Frames(link)
        nonce = secrets.token_bytes(frames.NONCE_BYTES)
        hello = frames.Hello(name=self._name, epoch=epoch, nonce=nonce, publication=publication)
        frames.send(link, hello)
        challenge = incoming.expect(frames.Challenge)
        assert isinstance(challenge, frames.Challenge)
        if not hmac.compare_digest(challenge.proof, frames.proof(self._token, "downstream", hello, challenge.nonce)):
            raise ProtocolError(f"{link.peer} does not know the run's token")
        frames.send(link, frames.Proof(proof=frames.proof(self._token, "upstream", hello, challenge.nonce)))
        answer = incoming.expect(frames.Welcome, frames.Refused)
        return answer if isinstance(answer, frames.Refused) else None

    # ---- shards to the relay that collects them ---------------------------------------------------------------

    def _send_shards(self, shards: Outgoing) -> None:
        """One link for one publication, to its end."""
        link, failure = None, ""
        try:
            link = self._connect(shards.collector, self._epoch, shards.publication, lambda: shards.lost)
            if link is not None:
                self._promote(link, shards.collector.name, self._epoch)
                sender = ShardSender(link, shards, self._sending_turn, self._place.bytes_per_s_max)
                sender.run(lambda: self._store.read(shards))
        except Exception as error:  # noqa: BLE001 - as in `_receive`
            failure = f"its shards did not get from {self._name} to {shards.collector.name}: {error}"
            log.info("chain_shards_not_sent", version=str(shards.version), reason=failure)
        finally:
            if link is not None:
                link.close()
        with contextlib.suppress(LinkEnded):
            self._store.sent(shards, failure)


@contextlib.contextmanager
def _in_time(link: Link) -> Iterator[None]:
    """A handshake: the link is closed if it takes too long, which ends all waits in it."""
    deadline = threading.Timer(HANDSHAKE_S, link.close)
    deadline.daemon = True
    deadline.start()
    try:
        yield
    finally:
        deadline.cancel()
