"""What holds for a link, over every transport that is installed: order, deadlines, and ends that are noticed."""

import errno
import mmap
import signal
import socket
import sys
import threading
from functools import partial

import numpy as np
import pytest
import xxhash
from relay_world import LIMIT_S
from transport_world import Kind, linked, over_each, peer, together

from laminar.errors import ConfigError, StartError
from laminar.workers.transport import RDMA, Link, LinkEnded, Listener, Stalled, make_transport
from laminar.workers.transport.arrivals import MARK_BYTES, preamble

MIB = 1 << 20
STALL_S = 1.0
FLOOD_BYTES = 512 * MIB  # more than all buffers between two processes hold
either_end = pytest.mark.parametrize("begin", ["listen", "connect"], ids=["to-it", "from-it"])


def random_bytes(num_bytes: int) -> bytes:
    return np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8).tobytes()


def mapped(data: bytes) -> memoryview:
    """A copy in memory of the kind that slots are made of, which some transports move in another way."""
    mapping = mmap.mmap(-1, len(data))
    mapping[:] = data
    return memoryview(mapping)


def flood(link: Link) -> None:
    """More than the buffers on the way hold."""
    block = mapped(bytes(MIB))
    for _ in range(FLOOD_BYTES // MIB):
        link.send(block)


def drain(link: Link) -> None:
    """As much, the other way."""
    block = mapped(bytes(MIB))
    for _ in range(FLOOD_BYTES // MIB):
        link.receive_into(block)


def sizes(seed: int, total: int) -> list[int]:
    """Sizes from 1 byte to 3 MiB that add up to `total`."""
    rng, left, found = np.random.default_rng(seed), total, []
    while left:
        found.append(min(int(2 ** rng.uniform(0, 21.6)), left))
        left -= found[-1]
    return found


@over_each
def test_bytes_arrive_in_order_however_they_are_cut_at_either_end(kind: Kind):
    data, target = mapped(random_bytes(24 * MIB + 7)), mapped(bytes(24 * MIB + 7))

    def send(link: Link) -> None:
        at = 0
        for size in sizes(1, len(data)):
            half = size // 2
            link.send(bytes(data[at : at + half]), data[at + half : at + size])
            at += size

    def receive(link: Link) -> None:
        at = 0
        for size in sizes(2, len(data)):
            link.receive_into(target[at : at + size])
            at += size

    with linked(kind) as (connected, accepted):
        together(lambda: send(connected), lambda: receive(accepted))
        assert target == data
        target[:] = bytes(len(data))
        together(lambda: send(accepted), lambda: receive(connected))
        assert target == data


@over_each
def test_both_directions_flow_at_the_same_time(kind: Kind):
    there, back = mapped(random_bytes(16 * MIB)), mapped(random_bytes(16 * MIB + 1))
    one, other = bytearray(len(there)), bytearray(len(back))
    with linked(kind) as (connected, accepted):
        together(
            lambda: connected.send(there),
            lambda: accepted.send(back),
            lambda: accepted.receive_into(memoryview(one)),
            lambda: connected.receive_into(memoryview(other)),
        )
    assert (one, other) == (there, back)


@over_each
def test_several_links_of_one_listener_do_not_mix(kind: Kind):
    transport, listener = kind.make(), kind.make().listen("127.0.0.1")
    links = []
    try:
        for _ in range(3):
            ends = transport.connect("127.0.0.1", listener.port, LIMIT_S), listener.accept()
            links.append(ends)
            together(*(end.promote for end in ends))
        targets = [bytearray(2 * MIB) for _ in links]
        together(
            *(partial(ends[0].send, bytes([number]) * (2 * MIB)) for number, ends in enumerate(links)),
            *(partial(ends[1].receive_into, memoryview(target)) for ends, target in zip(links, targets, strict=True)),
        )
        assert targets == [bytes([number]) * (2 * MIB) for number in range(3)]
    finally:
        for each in [end for ends in links for end in ends]:
            each.close()
        listener.close()


@over_each
def test_a_peer_that_does_not_read_stalls_the_sender(kind: Kind):
    with peer(kind, "idles", "connect", STALL_S) as other, pytest.raises(Stalled):
        flood(other.link)


@over_each
@either_end
def test_a_peer_that_does_not_write_stalls_the_receiver(kind: Kind, begin: str):
    with peer(kind, "idles", begin, STALL_S) as other, pytest.raises(Stalled):
        other.link.receive_into(memoryview(bytearray(1)))


@over_each
def test_a_stopped_reader_stalls_the_sender(kind: Kind):
    with peer(kind, "reads", progress_timeout_s=STALL_S) as other:
        other.link.send(bytes(4 * MIB))
        other.signal(signal.SIGSTOP)
        with pytest.raises(Stalled):
            flood(other.link)


@over_each
def test_a_stopped_writer_stalls_the_receiver_and_writes_nothing_when_it_wakes_up(kind: Kind):
    view = memoryview(mmap.mmap(-1, FLOOD_BYTES // 2))
    with peer(kind, "writes", progress_timeout_s=STALL_S) as other:
        other.link.receive_into(view[: 4 * MIB])
        other.signal(signal.SIGSTOP)
        with pytest.raises(Stalled):
            other.link.receive_into(view)
        held = xxhash.xxh3_64_digest(view)
        other.link.close()
        other.signal(signal.SIGCONT)
        other.process.wait(LIMIT_S)  # it finds its link ended
        assert xxhash.xxh3_64_digest(view) == held


@over_each
@pytest.mark.parametrize("role", ["idles", "reads", "writes"])
def test_a_killed_peer_is_noticed_long_before_the_deadline(kind: Kind, role: str):
    with peer(kind, role) as other:
        other.medium()
        other.signal(signal.SIGKILL)
        with pytest.raises(LinkEnded) as caught:
            drain(other.link)
        assert not isinstance(caught.value, Stalled)


@over_each
def test_a_sender_notices_a_killed_peer(kind: Kind):
    with peer(kind, "reads") as other:
        other.link.send(bytes(MIB))
        other.signal(signal.SIGKILL)
        with pytest.raises(LinkEnded) as caught:
            flood(other.link)
        assert not isinstance(caught.value, Stalled)


@over_each
@pytest.mark.parametrize("what", ["receive", "send"])
def test_close_wakes_who_waits_in_a_link(kind: Kind, what: str):
    caught: list[BaseException] = []
    waiting = threading.Event()

    def wait(link: Link) -> None:
        try:
            waiting.set()
            drain(link) if what == "receive" else flood(link)
        except OSError as error:
            caught.append(error)

    with linked(kind) as (connected, _):
        thread = threading.Thread(target=wait, args=(connected,))
        thread.start()
        waiting.wait(LIMIT_S)
        connected.close()
        connected.close()
        thread.join(LIMIT_S)
        assert [type(each) for each in caught] == [LinkEnded]
        with pytest.raises(LinkEnded):
            connected.send(b"x")


@over_each
def test_close_of_a_listener_wakes_who_waits_in_it_and_leaves_its_links(kind: Kind):
    with linked(kind) as (connected, accepted):
        listener = kind.make().listen("127.0.0.1")
        closing = threading.Timer(0.05, listener.close)
        closing.start()
        with pytest.raises(LinkEnded):
            listener.accept()
        closing.join()
        listener.close()
        connected.send(b"still here")
        target = bytearray(10)
        accepted.receive_into(memoryview(target))
        assert target == b"still here"


@over_each
def test_nobody_at_the_address_is_an_ended_link(kind: Kind):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(LinkEnded, match=f"cannot connect to 127.0.0.1:{port}"):
        kind.make().connect("127.0.0.1", port, LIMIT_S)


@over_each
def test_an_address_of_another_host_cannot_be_listened_on(kind: Kind):
    with pytest.raises(StartError, match=r"cannot listen on 203\.0\.113\.9"):
        kind.make().listen("203.0.113.9")


@over_each
def test_both_ends_say_the_same_of_what_a_link_runs_over(kind: Kind):
    with peer(kind, "idles", begin="connect", UCX_TLS="tcp") as other:
        assert other.medium() == other.link.medium
        assert other.link.medium.startswith("TCP")


# ---- streams -----------------------------------------------------------------------------------------------


def accept_none(listener: Listener) -> None:
    with pytest.raises(LinkEnded):
        listener.accept()


def said(port: int, text: bytes) -> socket.socket:
    connected = socket.create_connection(("127.0.0.1", port))
    connected.sendall(text)
    return connected


def test_the_number_of_streams_is_the_connecting_ends_choice():
    listener = make_transport("tcp", LIMIT_S).listen("127.0.0.1")
    connected = make_transport("tcp", LIMIT_S, streams=3).connect("127.0.0.1", listener.port, LIMIT_S)
    accepted = listener.accept()
    data, target = random_bytes(3 * MIB), bytearray(3 * MIB)
    together(lambda: connected.send(data), lambda: accepted.receive_into(memoryview(target)))
    assert target == data
    for each in (connected, accepted, listener):
        each.close()


def test_strangers_neither_delay_a_link_nor_add_a_stream_to_it():
    transport = make_transport("tcp", LIMIT_S, streams=2)
    listener = transport.listen("127.0.0.1")
    mark = bytes(MARK_BYTES)
    strangers = [
        said(listener.port, b""),
        said(listener.port, b"GET / HTTP/1.1\r\n\r\n"),
        said(listener.port, preamble(mark, 0, 2)),
        said(listener.port, preamble(mark, 0, 2)),  # the same stream twice
        said(listener.port, preamble(mark, 5, 2)),
        said(listener.port, preamble(mark, 0, 255)),
    ]
    connected = transport.connect("127.0.0.1", listener.port, LIMIT_S)
    accepted = listener.accept()
    connected.send(b"a" * MIB)
    target = bytearray(MIB)
    accepted.receive_into(memoryview(target))
    assert target == b"a" * MIB
    for each in (connected, accepted, listener, *strangers):
        each.close()


def test_a_link_whose_other_streams_do_not_come_is_dropped_after_the_deadline():
    listener = make_transport("tcp", 0.2).listen("127.0.0.1")
    accepting = threading.Thread(target=lambda: accept_none(listener))
    accepting.start()
    with said(listener.port, preamble(bytes(MARK_BYTES), 0, 2)) as half, said(listener.port, b"LML") as mute:
        for each in (half, mute):
            each.settimeout(LIMIT_S)
            assert each.recv(1) == b""
    listener.close()
    accepting.join(LIMIT_S)
    assert not accepting.is_alive()


def test_a_listener_out_of_descriptors_waits_for_one_instead_of_spinning(monkeypatch: pytest.MonkeyPatch):
    refused = iter([OSError(errno.EMFILE, "Too many open files")] * 3)
    pauses: list[float] = []
    accept = socket.socket.accept

    def out_of_descriptors(listening: socket.socket) -> object:
        for error in refused:
            raise error
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", out_of_descriptors)
    monkeypatch.setattr("laminar.workers.transport.arrivals.time.sleep", pauses.append)
    listener = make_transport("tcp", LIMIT_S).listen("127.0.0.1")
    connected = make_transport("tcp", LIMIT_S).connect("127.0.0.1", listener.port, LIMIT_S)
    accepted = listener.accept()
    assert len(pauses) == 3
    for each in (connected, accepted, listener):
        each.close()


# ---- choosing one ------------------------------------------------------------------------------------------


def test_an_unknown_transport_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match=r"no relay transport 'carrier-pigeon'; there is: tcp"):
        make_transport("carrier-pigeon", 1.0)


@pytest.mark.parametrize(("name", "package"), [("ucx", "ucxx"), ("nixl", "nixl_cu12")])
def test_a_transport_that_is_not_installed_is_refused_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
):
    monkeypatch.setitem(sys.modules, package, None)
    for loaded in [
        each for each in sys.modules if each.startswith((f"{package}.", f"laminar.workers.transport.{name}"))
    ]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(StartError, match=rf"not installed here .*: pip install .*{name}.*=="):
        make_transport(name, 1.0)


def test_rdma_that_is_required_and_not_there_is_refused():
    with pytest.raises(StartError, match="finds no RDMA device on this host and would use TCP"):
        make_transport("tcp", 1.0, require_rdma=True)


@over_each
def test_a_transport_says_whether_it_may_use_rdma(kind: Kind):
    transport = kind.make()
    if transport.medium == RDMA:
        assert make_transport(kind.name, 1.0, require_rdma=True).medium == RDMA
    else:
        with pytest.raises(StartError, match=f"the transport {kind.name} finds no RDMA"):
            make_transport(kind.name, 1.0, require_rdma=True)
