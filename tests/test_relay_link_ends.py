"""The two halves of a chain link whose epoch ends in the middle of a version: what has come stays, for the next link to go on."""

import contextlib
from collections.abc import Iterator

import pytest
from chain_world import manifest_of
from memory_link import Peer, Wire

from laminar.ids import Version
from laminar.workers.relay import chain_frames as frames
from laminar.workers.relay.chain_receive import Receiver
from laminar.workers.relay.chain_send import Cut, News, Sender, Sent
from laminar.workers.relay.digest import combine, digest_blocks
from laminar.workers.relay.flow import Flow
from laminar.workers.relay.link_speed import Fastest, LinkSpeed
from laminar.workers.relay.manifest import BLOCK_BYTES
from laminar.workers.transport import LinkEnded

V1 = Version(1, 0)
NUM_BYTES = 2 * BLOCK_BYTES


class Store:
    """A relay with one version; what it gave up."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.lost: list[str] = []

    def behind(self, link: object) -> "Store":
        return self

    def newest(self) -> tuple[Flow, int]:
        return self.flow, 1

    def ready(self, version: Version | None) -> None:
        return None

    def accept(self, version: Version, manifest: object) -> Flow:
        return self.flow

    def lose(self, flow: Flow, reason: str) -> None:
        self.lost.append(reason)

    @contextlib.contextmanager
    def held(self, found: tuple[Flow, int] | None) -> Iterator[Flow | None]:
        yield found[0] if found else None


def half_way() -> Flow:
    """A version of two blocks, the first of which is here."""
    flow = Flow(V1, manifest_of(NUM_BYTES), memoryview(bytearray(NUM_BYTES)))
    flow.advance(flow.next_block())
    return flow


def said(link: Wire) -> list[str]:
    """What went over the link: names of messages, and chunks."""
    heard = Wire()
    heard.said, names = link.answered, []
    incoming = frames.Frames(heard)  # type: ignore[arg-type]
    with contextlib.suppress(LinkEnded):
        while True:
            names.append(type(message := incoming.next()).__name__)
            if isinstance(message, frames.Chunk):
                heard.receive_into(memoryview(bytearray(message.length)))
    return names


def sender(link: Wire, flow: Flow, ends_after: int) -> Sender:
    """Its epoch is over once so many bytes went over the link."""
    return Sender(
        link,  # type: ignore[arg-type]
        Store(flow),  # type: ignore[arg-type]
        News(),
        Sent(),
        lambda: len(link.answered) > ends_after,
        lambda: None,
        Cut(BLOCK_BYTES, "never", 2, 0.0),
        LinkSpeed(Fastest()),
    )


def test_a_sender_whose_epoch_ends_in_mid_version_does_not_say_that_the_version_has_ended():
    link = Wire()
    frames.send(Peer(link), frames.Have(version=V1, offset=0))  # type: ignore[arg-type]
    with pytest.raises(LinkEnded):
        sender(link, half_way(), BLOCK_BYTES).run()
    assert said(link) == ["Offer", "Chunk"], "an End would have the receiver throw away what it has"


def test_a_sender_whose_epoch_ends_before_the_digest_is_known_does_not_say_that_the_version_has_ended():
    link, flow = Wire(), half_way()
    flow.advance(flow.next_block())
    frames.send(Peer(link), frames.Have(version=V1, offset=0))  # type: ignore[arg-type]
    with pytest.raises(LinkEnded):
        sender(link, flow, 2 * BLOCK_BYTES).run()
    assert said(link) == ["Offer", "Chunk", "Chunk"]


@pytest.mark.parametrize("last", ["", combine(digest_blocks(memoryview(bytes(NUM_BYTES))), NUM_BYTES)])
def test_an_end_that_comes_after_the_epoch_costs_nothing_that_was_received(last: str):
    link, flow = Wire(), half_way()
    store, peer = Store(flow), Peer(link)
    frames.send(peer, frames.Offer(version=V1, manifest=flow.manifest))  # type: ignore[arg-type]
    frames.send(peer, frames.End(version=V1, digest=last))  # type: ignore[arg-type]
    receiver = Receiver(link, frames.Frames(link), store, lambda: True, lambda: None, Fastest())  # type: ignore[arg-type]
    with pytest.raises(LinkEnded, match="the epoch is over"):
        receiver.run()
    assert (store.lost, flow.received) == ([], BLOCK_BYTES)
