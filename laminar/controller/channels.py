"""The controller's channels, one per worker name, without any I/O but a queue of frames for each connection.

A channel lasts as long as its worker process, over all its connections, and over the life of the controller too: what an event led
to is said to nobody before the event is on disk, so a controller that goes on from the log knows all that was ever said.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec
import structlog
from aiohttp import web

from laminar import wire
from laminar.channel import Session
from laminar.controller.translate import Origin
from laminar.ids import WorkerId

logger = structlog.get_logger(__name__)

ACKNOWLEDGE_EVERY = 64  # frames; more often is left to the heartbeat and to frames that go out anyway
OUTGOING_FRAMES_MAX = 100_000  # a worker that does not read for so long has lost its connection


class Channel:
    """One worker process, over all its connections."""

    def __init__(self, hello: wire.Hello) -> None:
        self.worker, self.role, self.incarnation = hello.worker, hello.role, hello.incarnation
        self.origin = Origin(hello.worker, hello.incarnation, hello.host)
        self.pid = hello.pid
        self.session = Session(wire.ControllerEnvelope)
        self.undurable: deque[tuple[int, int]] = deque()
        """(event seq, frame number) of frames that are not acknowledged yet."""
        self.socket: web.WebSocketResponse | None = None
        self.transport: asyncio.Transport | None = None
        self.outgoing: asyncio.Queue[bytes] = asyncio.Queue(OUTGOING_FRAMES_MAX)
        self.said_goodbye = False
        self.told = 0
        """Highest acknowledgement that was sent."""
        self.held: deque[tuple[int, bytes]] = deque()
        """(event seq, frame): the last frames of the session, which wait for their event to be on disk."""

    def attach(self, socket: web.WebSocketResponse, transport: asyncio.Transport | None) -> None:
        """From now on frames go to this connection."""
        self.outgoing = asyncio.Queue(OUTGOING_FRAMES_MAX)
        self.socket, self.transport = socket, transport

    def release(self, durable_seq: int) -> None:
        """Events up to this are on disk."""
        while self.undurable and self.undurable[0][0] <= durable_seq:
            self.session.acknowledge = self.undurable.popleft()[1]
        while self.held and self.held[0][0] <= durable_seq:
            self.put(self.held.popleft()[1])

    def put(self, frame: bytes) -> None:
        """Queue a frame for the present connection, if there is one. If it takes none any more it is cut."""
        if self.socket is None:
            return
        try:
            self.outgoing.put_nowait(frame)
        except asyncio.QueueFull:
            if self.transport is not None and not self.transport.is_closing():
                logger.warning("channel.full", worker=self.worker, frames=OUTGOING_FRAMES_MAX)
                self.transport.abort()


class KeptChannel(msgspec.Struct, kw_only=True):
    """A channel as the run's database keeps it."""

    worker: WorkerId
    role: str
    incarnation: int
    host: str
    sent: int
    frames: list[tuple[int, bytes]]
    """(number, frame) of those that the worker had not acknowledged."""
    said_goodbye: bool


class Kept(msgspec.Struct, kw_only=True):
    """All channels, and who was given up and why."""

    channels: list[KeptChannel] = []
    fenced: dict[WorkerId, tuple[int, str]] = {}


class Channels:
    """`boot`: of this controller. `continues`: the first boot with whose sessions it goes on; 0 = none.

    `hurry()` is called when somebody waits for the disk.
    """

    def __init__(self, boot: int, continues: int = 0) -> None:
        self.boot, self.continues = boot, continues
        self.hurry: Callable[[], None] = lambda: None
        self._channels: dict[WorkerId, Channel] = {}
        self._fenced: dict[WorkerId, tuple[int, str]] = {}
        self._vouched: dict[tuple[str, int], int] = {}
        self._durable = 0

    def workers(self, role: str) -> list[WorkerId]:
        """Known workers of a role, in order of arrival."""
        return [
            channel.worker for channel in self._channels.values() if channel.role == role and not channel.said_goodbye
        ]

    def all(self) -> list[Channel]:
        """All known worker processes."""
        return list(self._channels.values())

    def is_known(self, channel: Channel) -> bool:
        """Whether it is its worker's present one."""
        return self._channels.get(channel.worker) is channel

    def send(self, worker: WorkerId, message: wire.Message, cause: int) -> None:
        """Queue a message; it arrives once and in order, unless the worker is lost, after event `cause` is on disk."""
        channel = self._channels.get(worker)
        if channel is None:
            logger.warning("send.unknown_worker", worker=worker, message=type(message).__name__)
            return
        frame = channel.session.reliable(message)
        if cause > self._durable:
            channel.held.append((cause, frame))
            self.hurry()
        else:
            channel.put(frame)

    def stop(self, worker: WorkerId, reason: str) -> None:
        """The run is over, also for one that is still to be told other things, which may never reach the disk."""
        channel, message = self._channels[worker], wire.Stop(reason=reason)
        session = channel.session
        channel.put(session.unreliable(message) if channel.held else session.reliable(message))

    def fence(self, worker: WorkerId, incarnation: int, reason: str) -> None:
        """Refuse this incarnation and older ones from now on."""
        self._fenced[worker] = (incarnation, reason)
        channel = self._channels.get(worker)
        if channel is not None and channel.incarnation <= incarnation:
            channel.put(channel.session.unreliable(wire.Stop(reason=reason)))
            del self._channels[worker]

    def acknowledge(self, durable_seq: int) -> None:
        """Events up to this are on disk: their frames may be forgotten by the workers (said with the next frame)."""
        self._durable = max(self._durable, durable_seq)
        for channel in self._channels.values():
            if not (channel.undurable or channel.held):
                continue  # most, at each commit
            channel.release(durable_seq)
            if channel.session.acknowledge - channel.told >= ACKNOWLEDGE_EVERY:
                channel.told = channel.session.acknowledge
                channel.put(channel.session.unreliable(wire.Heartbeat()))

    # ---- over the life of the controller ---------------------------------------------------------------------

    def keep(self) -> Kept:
        """What a controller that goes on after this one needs of the channels."""
        channels = [
            KeptChannel(
                worker=channel.worker,
                role=channel.role,
                incarnation=channel.incarnation,
                host=channel.origin.host,
                sent=channel.session.sent,
                frames=channel.session.kept,
                said_goodbye=channel.said_goodbye,
            )
            for channel in self._channels.values()
        ]
        return Kept(channels=channels, fenced=self._fenced)

    def resume(self, kept: Kept) -> None:
        """Go on with what another controller kept."""
        self._fenced = dict(kept.fenced)
        for old in kept.channels:
            channel = self.expect(old.worker, old.role, old.incarnation, old.host)
            channel.session.resume(old.sent, old.frames)
            channel.said_goodbye = old.said_goodbye

    def expect(self, worker: WorkerId, role: str, incarnation: int, host: str) -> Channel:
        """The channel of a worker that joined the controller before this one; it will dial in."""
        hello = wire.Hello(protocol=wire.PROTOCOL, worker=worker, role=role, incarnation=incarnation, host=host)
        channel = self._new_channel(hello)
        self._vouch_for(channel)
        return channel

    def vouch(self, frames: dict[tuple[str, int], int]) -> None:
        """(worker, incarnation) -> frame up to which all that it said is in the log."""
        self._vouched = frames
        for channel in self._channels.values():
            self._vouch_for(channel)

    def _new_channel(self, hello: wire.Hello) -> Channel:
        channel = self._channels[hello.worker] = Channel(hello)
        if self._shares_sessions(hello):
            self._vouch_for(channel)
        return channel

    def _vouch_for(self, channel: Channel) -> None:
        received = self._vouched.get((channel.worker, channel.incarnation), 0)
        channel.session.received = channel.session.acknowledge = received

    # ---- greeting ------------------------------------------------------------------------------------------

    def greet(self, hello: wire.Hello) -> tuple[Channel, bool]:
        """The channel of a worker that dials in and is not refused; and whether it was here before."""
        known = self._channels.get(hello.worker)
        if known is not None and known.incarnation == hello.incarnation:
            return known, True
        return self._new_channel(hello), False

    def unheard(self, channel: Channel, hello: wire.Hello) -> list[bytes]:
        """Frames that it has not received and may, in order."""
        kept = channel.session.resend(hello.received if self._shares_sessions(hello) else 0)
        return kept[: len(kept) - len(channel.held)]

    def _shares_sessions(self, hello: wire.Hello) -> bool:
        """Whether the frames that it has received are this controller's, or of one with whose sessions this one goes on."""
        return hello.boot == self.boot or 0 < self.continues <= hello.boot

    def reason_to_refuse(self, hello: wire.Hello) -> str:
        """Why this process may not have a channel; empty = it may."""
        fenced, why = self._fenced.get(hello.worker, (-1, ""))
        known = self._channels.get(hello.worker)
        if hello.protocol != wire.PROTOCOL:
            return (
                f"protocol {hello.protocol} of the worker, {wire.PROTOCOL} of the controller: install the same Laminar"
            )
        if hello.incarnation <= fenced:
            return f"this process was given up: {why}"
        if self._shares_sessions(hello) and hello.received > (known.session.sent if known else 0):
            return "it has heard what this controller's log does not know of: a part of the log was lost"
        if known is not None and known.incarnation > hello.incarnation:
            return "a newer process of this name is here"
        if known is not None and known.incarnation != hello.incarnation and known.socket and not known.said_goodbye:
            return f"{hello.worker} is connected already (pid {known.pid}); choose another name"
        return ""
