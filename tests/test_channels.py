"""The controller's channels without sockets: what waits for the disk, and how another controller goes on with them."""

import msgspec

from laminar import wire
from laminar.controller.channels import Channel, Channels, Kept
from laminar.ids import Version, WorkerId

ROLLOUT = WorkerId("rollout-0")


def hello(**changes: object) -> wire.Hello:
    standard = {"protocol": wire.PROTOCOL, "worker": ROLLOUT, "role": "rollout", "incarnation": 10}
    return wire.Hello(**(standard | changes))  # type: ignore[arg-type]


def publish(step: int) -> wire.Publish:
    return wire.Publish(version=Version(step, 0))


class Socket:
    """Stands for a connection: frames are read from the channel's queue."""


def connect(channel: Channel) -> None:
    channel.attach(Socket(), None)  # type: ignore[arg-type]


def steps(frames: list[bytes]) -> list[int]:
    found = [wire.decode_from_controller(frame).message for frame in frames]
    return [message.version.step for message in found if isinstance(message, wire.Publish)]


def going_out(channel: Channel) -> list[int]:
    frames = []
    while not channel.outgoing.empty():
        frames.append(channel.outgoing.get_nowait())
    return steps(frames)


def test_nothing_is_said_before_its_cause_is_on_disk_and_somebody_is_told_to_hurry():
    hurried = []
    channels = Channels(boot=1)
    channels.hurry = lambda: hurried.append(1)
    channel, _ = channels.greet(hello())
    connect(channel)
    channels.acknowledge(4)
    channels.send(ROLLOUT, publish(1), cause=4)
    channels.send(ROLLOUT, publish(2), cause=5)
    channels.send(ROLLOUT, publish(3), cause=7)
    assert going_out(channel) == [1]
    assert len(hurried) == 2
    channels.acknowledge(6)
    assert going_out(channel) == [2]
    channels.acknowledge(7)
    assert going_out(channel) == [3]


def test_a_worker_that_dials_in_again_gets_what_it_has_not_heard_but_nothing_that_waits_for_the_disk():
    channels = Channels(boot=1)
    channel, _ = channels.greet(hello())
    for step in (1, 2):
        channels.send(ROLLOUT, publish(step), cause=0)
    channels.send(ROLLOUT, publish(3), cause=9)
    again = hello(boot=1, received=1)
    assert channels.greet(again) == (channel, True)
    assert steps(channels.unheard(channel, again)) == [2]
    connect(channel)
    channels.acknowledge(9)
    assert going_out(channel) == [3]


def test_the_word_to_stop_does_not_wait_behind_what_may_never_reach_the_disk():
    channels = Channels(boot=1)
    channel, _ = channels.greet(hello())
    connect(channel)
    channels.send(ROLLOUT, publish(1), cause=9)
    channels.stop(ROLLOUT, "over")
    envelope = wire.decode_from_controller(channel.outgoing.get_nowait())
    assert (envelope.number, envelope.message) == (0, wire.Stop(reason="over"))


def taken_over(old: Channels) -> Channels:
    """Those of the next controller, by way of the disk."""
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(old.keep()), type=Kept)
    channels = Channels(boot=2, continues=1)
    channels.resume(kept)
    return channels


def test_the_next_controller_goes_on_with_the_numbers_and_the_frames_of_the_last():
    old = Channels(boot=1)
    channel, _ = old.greet(hello())
    for step in (1, 2, 3):
        old.send(ROLLOUT, publish(step), cause=0)
    channel.session.forget(1)
    new = taken_over(old)
    new.vouch({(ROLLOUT, 10): 7})
    back = hello(boot=1, received=2)
    assert new.reason_to_refuse(back) == ""
    restored, was_here = new.greet(back)
    assert was_here
    assert (restored.session.received, restored.session.acknowledge, restored.session.sent) == (7, 7, 3)
    assert steps(new.unheard(restored, back)) == [3]


def test_a_worker_that_has_heard_what_the_log_does_not_know_is_refused():
    old = Channels(boot=1)
    old.greet(hello())
    old.send(ROLLOUT, publish(1), cause=0)
    new = taken_over(old)
    assert "a part of the log was lost" in new.reason_to_refuse(hello(boot=1, received=2))
    assert "a part of the log was lost" in new.reason_to_refuse(hello(worker=WorkerId("rollout-9"), boot=1, received=1))
    assert new.reason_to_refuse(hello(boot=1, received=1)) == ""


def test_a_worker_that_had_not_joined_is_new_to_the_next_controller_and_what_it_said_is_vouched_for():
    new = taken_over(Channels(boot=1))
    new.vouch({(ROLLOUT, 10): 2})
    channel, was_here = new.greet(hello(boot=1))
    assert not was_here
    assert channel.session.received == 2


def test_who_was_given_up_stays_given_up():
    old = Channels(boot=1)
    old.greet(hello())
    old.fence(ROLLOUT, 10, "it hung")
    assert "given up: it hung" in taken_over(old).reason_to_refuse(hello(boot=1, received=0))


def test_a_worker_of_a_controller_before_the_first_that_is_continued_begins_anew():
    old = Channels(boot=5)
    old.greet(hello())
    old.send(ROLLOUT, publish(1), cause=0)
    kept = old.keep()
    new = Channels(boot=6, continues=5)
    new.resume(kept)
    stranger = hello(boot=3, received=40)
    assert new.reason_to_refuse(stranger) == ""
    channel, _ = new.greet(stranger)
    assert steps(new.unheard(channel, stranger)) == [1]
