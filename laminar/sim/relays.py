"""The relays of the simulated world: one on every rollout host and one beside the trainer. Weights flow along the core's chain.

    trainer ──stall──► master ──► relay ──► relay …      complete after T*(distance + 1) of the paper's pipelined chain

A relay that lacks the newest version of the nearest complete relay before it receives that, cut-through: for the last M·b seconds
before it is complete it receives at line rate. A new epoch lets every relay go on from the byte it has. Each has SLOTS version
slots and recycles the oldest that nobody reads; what the core wants kept it has as a delta then, DELTAS_MAX versions at most, and
rebuilds it for a pull. Invariants, checked: epochs grow; a replica pulls only what its relay holds.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laminar.core import actions, events, relays, versions
from laminar.ids import Version, WorkerId
from laminar.sim.cluster import chain_s

if TYPE_CHECKING:
    from laminar.sim.world import World

SLOTS = 3  # newest, incoming, one more
DELTAS_MAX = 3  # a fifth of a version's bytes, of which each takes a fifteenth
REBUILD_BYTES_PER_S = 1e9  # by one core
HOSTS_PER_RACK = 4
RECONNECT_S = 0.2  # neighbours of a new epoch connect and say from which byte to go on
PROGRESS_TIMEOUT_S = 0.5  # no byte for so long while bytes are due: the link is broken, or slow
TRAINER_HOST = "trainer-host"


@dataclass(kw_only=True)
class Reception:
    """A version on its way into a relay."""

    version: Version
    num_bytes: float = 0.0
    """Received before `epoch`."""
    epoch: int = -1
    """Epoch in which it goes on; -1 = it stands still."""
    ends_at: float = 0.0
    per_byte_s: float = 0.0


@dataclass(kw_only=True)
class Daemon:
    """A relay process."""

    worker: WorkerId
    incarnation: int
    held: list[Version] = field(default_factory=list)
    """In order of publication."""
    retained: list[Version] = field(default_factory=list)
    """What the core wants kept."""
    deltas: dict[Version, None] = field(default_factory=dict)
    """Of `held`: those without a slot."""
    readers: Counter[Version] = field(default_factory=Counter)
    receiving: Reception | None = None
    slowness: float = 1.0
    """So many times as slow is the link into it."""
    connected: bool = True
    given_up: bool = False
    """The core counts it as lost while it goes on behind a broken network."""


class Relays:
    """All relays, and what flows between them."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.daemons: dict[WorkerId, Daemon] = {}
        self.restart_s = 60.0
        """From the core's word to start a relay again until it joins."""
        self.absent_until: dict[WorkerId, float] = {}
        """Hosts that are away: their relays cannot start before."""
        self._publications: dict[Version, int] = {}
        self._epoch = 0
        self._reported = -1
        self.answers: dict[type, Callable[..., None]] = {
            actions.ArrangeChain: self._on_arrange_chain,
            actions.RetainVersions: self._on_retain,
        }

    def begin(self) -> None:
        """The trainer's relay joins first, then those of the rollout hosts."""
        for index in range(self.world.cluster.num_hosts + 1):
            self.join(WorkerId(f"relay-{index}"), 1)

    def begin_midway(self) -> None:
        """Relays hold what the core's state says, and go on to receive what they lack."""
        state = self.world.core.state
        self._epoch = state.chain.epoch
        self._publications = {record.version: number for number, record in enumerate(state.versions)}
        for relay in state.relays.values():
            self.daemons[relay.id] = Daemon(
                worker=relay.id, incarnation=relay.incarnation, held=list(relay.held), retained=list(relay.retained),
                deltas=dict.fromkeys(relay.held[:-SLOTS]),
            )  # fmt: skip
        self.world.after(0.0, self._flow)

    def join(self, worker: WorkerId, incarnation: int) -> None:
        """A new process with empty slots."""
        index = int(worker.removeprefix("relay-"))
        self.daemons[worker] = Daemon(worker=worker, incarnation=incarnation)
        host, rack = TRAINER_HOST, "trainer"
        if index:
            host, rack = f"rollout-host-{index - 1}", f"rack-{(index - 1) // HOSTS_PER_RACK}"
        self.world.send(events.RelayJoined(worker=worker, incarnation=incarnation, host=host, rack=rack))

    def start(self, worker: WorkerId) -> None:
        """The launcher starts a lost relay again."""
        incarnation = self.world.core.state.fenced[worker] + 1

        def join() -> None:
            if not self.world.core.state.finished and worker not in self.daemons:
                self.join(worker, incarnation)

        self.world.at(max(self.world.now + self.restart_s, self.absent_until.get(worker, 0.0)), join)

    def stop(self, worker: WorkerId, incarnation: int) -> None:
        """The core has given it up. One that cannot be reached goes on until it returns, and is refused then."""
        daemon = self.daemons.get(worker)
        if daemon is not None and daemon.incarnation == incarnation:
            daemon.given_up = not daemon.connected
            self.kill(worker)

    def kill(self, worker: WorkerId) -> Daemon | None:
        """The process is gone, or out of reach for ever. The core does not know yet."""
        daemon = self.daemons.pop(worker, None)
        if daemon is not None:
            self.stall(worker)
        return daemon

    def lose_host(self, host: str, seconds: float) -> None:
        """The host's relay is gone without a word; another host can have one after so long."""
        worker = self.world.core.state.relay_hosts.get(host)
        daemon = self.kill(worker) if worker else None
        if daemon is not None:
            self.absent_until[daemon.worker] = self.world.now + seconds
            self.world.send(events.WorkerDisconnected(worker=daemon.worker, incarnation=daemon.incarnation))

    # ---- publication and pulls ---------------------------------------------------------------------------------

    def publication(self, version: Version) -> Callable[[], None]:
        """To be called when the trainer has written its shards, which go to the present master, unless that dies before."""
        master = self.world.core.state.publishing_to
        daemon = self.daemons.get(master) if master else None

        def written() -> None:
            if daemon is None or self.daemons.get(daemon.worker) is not daemon or not daemon.connected:
                return
            if self._make_room(daemon):
                self._publications.setdefault(version, len(self._publications))
                self._take_in(daemon, version)
                self.world.send(self._ready(daemon, version))
                self._flow()
            else:
                self.world.send(events.VersionLost(version=version, reason="superseded: no slot is free"))

        return written

    def _ready(self, daemon: Daemon, version: Version) -> events.AnyEvent:
        size = int(self.world.cluster.model.weight_bytes)
        return events.VersionReady(worker=daemon.worker, version=version, digest=self._digest(version), num_bytes=size)

    def _digest(self, version: Version) -> str:
        """What it became known with, if it is."""
        record = versions.find(self.world.core.state, version)
        return (record.digest if record else "") or f"d{version}"

    def pull_s(self, action: actions.PullWeights) -> float:
        """How long a replica reads its version: out of its relay's slot, which is not recycled meanwhile, or from a checkpoint."""
        if action.source == "checkpoint":
            return self.world.cluster.checkpoint_pull_s()
        state, seconds = self.world.core.state, self.world.cluster.pull_s()
        giver = relays.source(state, state.replicas[action.worker].host)
        daemon = self.daemons.get(giver.id) if giver else None
        if daemon is None:
            return seconds  # it has just died; what is mapped can be read to its end
        assert action.version in daemon.held, f"{action.worker} pulls {action.version}, its relay has {daemon.held}"
        if action.version in daemon.deltas:
            return seconds + self.world.cluster.model.weight_bytes / REBUILD_BYTES_PER_S
        daemon.readers[action.version] += 1

        def release() -> None:
            daemon.readers[action.version] -= 1

        self.world.after(seconds, release)
        return seconds

    def _make_room(self, daemon: Daemon) -> bool:
        """A free slot, if need be the oldest version's that nobody reads. Never the newest."""
        slotted = [version for version in daemon.held if version not in daemon.deltas]
        if len(slotted) + (daemon.receiving is not None) < SLOTS:
            return True
        idle = [version for version in slotted[:-1] if not daemon.readers[version]]
        if not idle:
            return False
        if idle[0] in daemon.retained and len(daemon.deltas) < DELTAS_MAX:
            daemon.deltas[idle[0]] = None
        else:
            self._drop(daemon, idle[0])
        return True

    def _drop(self, daemon: Daemon, version: Version) -> None:
        daemon.held.remove(version)
        daemon.deltas.pop(version, None)
        self.world.send(events.VersionDropped(worker=daemon.worker, version=version))

    def _on_retain(self, action: actions.RetainVersions) -> None:
        daemon = self.daemons.get(action.worker)
        if daemon is None:
            return
        daemon.retained = action.versions

        def drop() -> None:
            if self.daemons.get(daemon.worker) is daemon:
                for version in [version for version in daemon.deltas if version not in daemon.retained]:
                    self._drop(daemon, version)

        self.world.after(0.0, drop)

    def _take_in(self, daemon: Daemon, version: Version) -> None:
        daemon.held.append(version)
        daemon.held.sort(key=self._publications.__getitem__)

    # ---- the chain ---------------------------------------------------------------------------------------------

    def _on_arrange_chain(self, action: actions.ArrangeChain) -> None:
        assert action.epoch > self._epoch, f"chain {action.epoch} after {self._epoch}"
        assert action.order[0] == action.master, f"{action.master} is not the first of {action.order}"
        self._epoch = action.epoch
        for daemon in self.daemons.values():
            self._freeze(daemon)

        def connected() -> None:
            if self._epoch == action.epoch:
                self._flow()

        self.world.after(RECONNECT_S, connected)

    def stall(self, worker: WorkerId) -> None:
        """What comes after a relay that is dead, cut off or has become slow, stands still from now on."""
        order = self.world.core.state.chain.order
        for behind in order[order.index(worker) :] if worker in order else []:
            if behind in self.daemons:
                self._freeze(self.daemons[behind])
        self.world.after(0.0, self._flow)

    def _freeze(self, daemon: Daemon) -> None:
        reception = daemon.receiving
        if reception is not None and reception.epoch >= 0:
            left = max(0.0, reception.ends_at - self.world.now) / reception.per_byte_s
            reception.num_bytes = max(reception.num_bytes, self.world.cluster.model.weight_bytes - left)
            reception.epoch = -1

    def _flow(self) -> None:
        """Along the chain: whoever lacks what those before it have receives it, as far as the chain is whole."""
        order, before, version = self.world.core.state.chain.order, None, None
        distance, left, slowness = 0, 0.0, 1.0
        for index, worker in enumerate(order):
            daemon = self.daemons.get(worker)
            if daemon is None or not daemon.connected:
                self._report_broken(before, order[index + 1 :], worker, version)
                return
            before = worker
            if daemon.receiving is None and (version is None or version in daemon.held):
                version = daemon.held[-1] if daemon.held else None
                distance, left, slowness = 0, 0.0, 1.0
                continue
            distance, slowness = distance + 1, max(slowness, daemon.slowness)
            if self._begin(daemon, version):
                left = self._schedule(daemon, distance, left, slowness)
            if daemon.slowness > 1.0 and index < len(order) - 1:
                self._report_slow(order[index - 1], worker)

    def _begin(self, daemon: Daemon, version: Version | None) -> bool:
        """Go on with what it receives, or begin with what is newest before it. False if no slot is free yet."""
        if daemon.receiving is not None and self._is_held(daemon.receiving.version):
            return True
        daemon.receiving = None
        if version is None or version in daemon.held:
            return False
        if not self._make_room(daemon):
            self.world.after(PROGRESS_TIMEOUT_S, self._flow)
            return False
        daemon.receiving = Reception(version=version)
        return True

    def _is_held(self, version: Version) -> bool:
        return any(version in daemon.held for daemon in self.daemons.values())

    def _schedule(self, daemon: Daemon, distance: int, left: float, slowness: float) -> float:
        """When it will be complete. Returns the bytes still to come to it, or to one between it and the nearest complete one."""
        reception, cluster = daemon.receiving, self.world.cluster
        assert reception is not None
        if reception.epoch == self._epoch:
            return max(left, (reception.ends_at - self.world.now) / reception.per_byte_s)
        left = max(left, cluster.model.weight_bytes - reception.num_bytes)
        reception.epoch, reception.per_byte_s = self._epoch, slowness * cluster.link_byte_s()
        seconds = chain_s(left, distance + 1, reception.per_byte_s, cluster.software.message_s)
        reception.ends_at = self.world.now + seconds
        ends_at = reception.ends_at

        def complete() -> None:
            if daemon.receiving is reception and (reception.epoch, reception.ends_at) == (self._epoch, ends_at):
                self._complete(daemon, reception.version)

        self.world.at(ends_at, complete)
        return left

    def _complete(self, daemon: Daemon, version: Version) -> None:
        daemon.receiving = None
        if self.daemons.get(daemon.worker) is daemon and daemon.connected:
            self._take_in(daemon, version)
            self.world.send(events.VersionHeld(worker=daemon.worker, version=version, digest=self._digest(version)))
            self._flow()

    # ---- what relays tell of their links -----------------------------------------------------------------------

    def _report_broken(
        self, before: WorkerId | None, behind: list[WorkerId], peer: WorkerId, version: Version | None
    ) -> None:
        """Bytes are due through a relay that does not answer: the neighbour that waits for it says so, once per epoch."""
        waiting = [w for w in behind if w in self.daemons and self.daemons[w].connected]
        due_to = before if before is not None and version is not None else None
        due_from = next((worker for worker in waiting if self.daemons[worker].receiving is not None), None)
        reporter = due_to or due_from
        if reporter is not None:
            self._tell_later(events.LinkBroken(worker=reporter, peer=peer, epoch=self._epoch))

    def _report_slow(self, worker: WorkerId, peer: WorkerId) -> None:
        self._tell_later(events.LinkSlow(worker=worker, peer=peer, epoch=self._epoch))

    def _tell_later(self, event: events.LinkBroken | events.LinkSlow) -> None:
        if self._reported == self._epoch:
            return
        self._reported = self._epoch

        def tell() -> None:
            reporter = self.daemons.get(event.worker)
            if reporter is not None and reporter.connected and not self.world.core.state.finished:
                self.world.send(event)

        self.world.after(PROGRESS_TIMEOUT_S, tell)
