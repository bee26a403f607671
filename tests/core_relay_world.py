"""The seeded world of `core_world` with a relay on every host: they fill each other, recycle slots, die, and lose links."""

from functools import partial
from typing import Any

from core_world import World

from laminar.core import actions, events
from laminar.core.settings import Settings
from laminar.ids import Version, WorkerId

SLOTS = 3


class Daemon:
    """A relay process: what it holds, in order of arrival."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.held: list[Version] = []


class RelayWorld(World):
    """The first hosts are the trainer's, `h0` or more; replica `ri` runs on host i modulo their number. Racks are the even and the
    odd hosts."""

    def __init__(
        self,
        settings_: Settings,
        seed: int,
        faults: float = 0.0,
        replicas: int = 3,
        hosts: int = 3,
        trainer_hosts: int = 1,
    ) -> None:
        super().__init__(settings_, seed, faults, replicas)
        self.num_hosts, self.num_trainer_hosts = hosts, trainer_hosts
        self.publication = 0
        self.daemons: dict[WorkerId, Daemon] = {}
        self.epoch = 0

    def _begin(self) -> list[actions.AnyAction]:
        out = list(self.send(events.RunStarted(boot=1)))
        for host in range(self.num_hosts):
            out += self.relay_joins(WorkerId(f"relay-{host}"), 1)
        out += self.rank()
        for index in range(self.num_replicas):
            out += self.join(f"r{index}")
        return out

    def join(self, name: str, incarnation: int = 1, requests: int = 64, host: str = "") -> list[actions.AnyAction]:
        return super().join(name, incarnation, requests, f"h{int(name[1:]) % self.num_hosts}")

    def rank(
        self, rank: int = 0, incarnation: int = 1, world_size: int = 1, step: int = 0, **restored: Any
    ) -> list[actions.AnyAction]:
        """All ranks of a launch, one per trainer host."""
        out: list[actions.AnyAction] = []
        for number in range(self.num_trainer_hosts):
            event = events.TrainerRankReady(
                worker=WorkerId(f"trainer-{number}/{number}"),
                incarnation=incarnation,
                rank=number,
                world_size=self.num_trainer_hosts,
                step=step,
                host=f"h{number}",
                **restored,
            )
            out += self.send(event)
        return out

    def relay_joins(self, worker: WorkerId, incarnation: int) -> list[actions.AnyAction]:
        self.daemons[worker] = Daemon(incarnation)
        host = int(worker.removeprefix("relay-"))
        return self.relay(worker, incarnation, f"h{host}", f"rack-{host % 2}")

    # ---- weights -----------------------------------------------------------------------------------------------

    def _on_ArrangeChain(self, action: actions.ArrangeChain) -> None:
        assert action.epoch > self.epoch, "an epoch was used twice"
        self.epoch = action.epoch
        assert action.order[0] == action.master
        assert len(set(action.order)) == len(action.order), "a relay is chained twice"
        self._fill()

    def _fill(self) -> None:
        """Whoever lacks the master's newest version gets it, sooner or later."""
        state = self.core.state
        master = self.daemons.get(state.chain.master) if state.chain.master else None
        if master is None or not master.held:
            return
        newest = max(master.held, key=lambda version: (version.branch, version.step))
        for worker in state.chain.order:
            daemon = self.daemons.get(worker)
            if daemon and newest not in daemon.held:
                self.pending.append(partial(self._arrive, worker, daemon, newest))

    def _arrive(self, worker: WorkerId, daemon: Daemon, version: Version) -> list[actions.AnyAction]:
        sources = [d for d in self.daemons.values() if version in d.held]
        if self.daemons.get(worker) is not daemon or version in daemon.held or not sources:
            return []
        return self._take_in(
            worker, daemon, version, events.VersionHeld(worker=worker, version=version, digest=f"d{version}")
        )

    def _take_in(
        self, worker: WorkerId, daemon: Daemon, version: Version, event: events.AnyEvent
    ) -> list[actions.AnyAction]:
        out = []
        daemon.held.append(version)
        if len(daemon.held) > SLOTS:
            out += self.send(events.VersionDropped(worker=worker, version=daemon.held.pop(0)))
        return [*out, *self.send(event)]

    def _on_PublishVersion(self, action: actions.PublishVersion) -> None:
        assert action.publication > self.publication, "two orders have one number"
        self.publication = action.publication
        master = self.core.state.publishing_to
        daemon = self.daemons.get(master)
        if daemon is None:
            return  # lost by the same event
        others = self._others(action)
        if self.core.settings.trainer_restarts_max:
            self._of_launch(events.ShardsWritten(version=action.version, stall_s=0.1, publication=action.publication))
        lost = self.random.random() < self.faults
        word = events.VersionLost(version=action.version, reason="test", publication=action.publication)
        if lost and self.random.random() < 0.5:
            self.pending.append(lambda: self.send(word))  # another relay or a rank says so as well

        def end() -> list[actions.AnyAction]:
            if self.daemons.get(master) is not daemon or action.version in daemon.held:
                return []
            if lost or any(self.daemons.get(worker) is not other for worker, other in others.items()):
                return self.send(word)
            ready = events.VersionReady(worker=master, version=action.version, digest=f"d{action.version}", num_bytes=1)
            out = self._take_in(master, daemon, action.version, ready)
            self._fill()
            return out

        self.pending.append(end)

    def _others(self, action: actions.PublishVersion) -> dict[WorkerId, Daemon]:
        """The relays that send shards to the one that collects them."""
        workers = [WorkerId(f"relay-{host}") for host in range(self.num_trainer_hosts)]
        assert (action.relay is not None) == (self.num_trainer_hosts > 1)
        assert action.relay is None or action.relay in workers, "no rank can write where the version is collected"
        return {w: self.daemons[w] for w in workers if w != action.relay and w in self.daemons} if action.relay else {}

    def _on_PullWeights(self, action: actions.PullWeights) -> None:
        if action.source == "checkpoint":
            assert self.core.settings.checkpoint_pulls
            assert action.version.step == self.checkpoint, "there is no checkpoint of this version"
        else:
            host = self.core.state.replicas[action.worker].host
            own = self.daemons.get(WorkerId(f"relay-{host[1:]}"))
            giver = own or self.daemons[self.core.state.chain.master]
            assert action.version in giver.held, f"{action.worker} pulls {action.version}, its relay has {giver.held}"
        super()._on_PullWeights(action)

    # ---- faults ------------------------------------------------------------------------------------------------

    def _fault(self) -> list[actions.AnyAction]:
        chain = self.core.state.chain
        if self.random.random() < 0.5 or len(chain.order) < 2:
            return super()._fault()
        worker, peer = self.random.sample(chain.order, 2)
        epoch = chain.epoch - self.random.choice([0, 0, 0, 1])
        match self.random.choice(["crash", "broken", "slow", "silent"]):
            case "crash":
                daemon = self.daemons.pop(worker)
                return self.send(events.WorkerLost(worker=worker, incarnation=daemon.incarnation, reason="killed"))
            case "broken":
                return self.send(events.LinkBroken(worker=worker, peer=peer, epoch=epoch))
            case "slow":
                return self.send(events.LinkSlow(worker=worker, peer=peer, epoch=epoch))
        incarnation = self.daemons[worker].incarnation
        self.pending.append(lambda: self.send(events.WorkerReturned(worker=worker, incarnation=incarnation)))
        return self.send(events.WorkerDisconnected(worker=worker, incarnation=incarnation))

    def _on_StopWorker(self, action: actions.StopWorker) -> None:
        super()._on_StopWorker(action)
        daemon = self.daemons.get(action.worker)
        if daemon is not None and daemon.incarnation == action.incarnation:
            del self.daemons[action.worker]
        if action.worker.startswith("relay-") and not self.core.settings.relay_restarts_max:
            self.pending.append(lambda: self.relay_joins(action.worker, action.incarnation + 1))

    def _on_StartWorker(self, action: actions.StartWorker) -> None:
        if not action.worker.startswith("relay-"):
            super()._on_StartWorker(action)
        elif self.random.random() < 0.3:
            event = events.WorkerLost(worker=action.worker, incarnation=0, reason="did not start")
            self.pending.append(lambda: self.send(event))
        else:
            incarnation = self.core.state.fenced[action.worker] + 1
            self.pending.append(lambda: self.relay_joins(action.worker, incarnation))
