"""Real relay daemons under the real core: what relays say becomes its events, its actions become messages to them.

The trainer and a replica beside every relay are played here, and really publish and read. Every link of the chain goes through a
proxy (`link_proxy`) that a test can hurt; so can it the daemons and their channels to the controller.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from aiohttp import web
from chain_world import content, manifest_of
from controller_end import TOKEN, ControllerEnd
from core_world import Driver, settings
from link_proxy import Proxy

from laminar import wire
from laminar.channel import Session
from laminar.config import Config, ControllerConfig, RelayConfig
from laminar.controller.translate import Origin
from laminar.core import actions, events, versions
from laminar.core.relay_records import Relay
from laminar.errors import LaminarError
from laminar.ids import Version, WorkerId
from laminar.workers.relay import paths
from laminar.workers.relay.client import RelayClient, RelayError

LIMIT_S = 60.0
NUM_STEPS = 1_000_000  # no test comes to the end of the run
READ_LIMIT_S = 10.0  # a relay that was killed does not answer, and what waits for it holds up the end of a test
LINK_TIMEOUT_S = 15.0  # a starved machine may stand still for some seconds, and relays are lost for that
SILENT_S = 3.0  # the same where a test waits for it, because a host is silent


class _NamedSession(Session):
    """Greets with a run id of its own, as every relay here is alone on its host."""

    run_id = ""

    def unreliable(self, message: wire.Message) -> bytes:
        if isinstance(message, wire.Welcome):
            message = msgspec.structs.replace(message, run_id=self.run_id)
        return super().unreliable(message)


class Member(ControllerEnd):
    """A relay on a host of its own, and the controller's end of its channel."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        super().__init__(cluster.config)
        self.name, self.host, self.replica = name, f"h-{name}", f"replica-{name}"
        self.cluster = cluster
        self.run_id = f"test-{uuid.uuid4().hex[:10]}-{name}"
        self.directory = paths.shm_directory(self.run_id)
        self.client = RelayClient(self.directory, LIMIT_S)
        self.incarnation = 0
        self.cut_off = False
        """The controller and it cannot reach each other."""
        self.options: list[str] = []
        """More arguments of its daemon."""
        self.process: subprocess.Popen[str] | None = None
        self.logs: list[str] = []
        self._renew()

    @property
    def worker(self) -> WorkerId:
        return WorkerId(self.name)

    def launch(self) -> None:
        """Start the daemon, on a host where an earlier one may have left something."""
        self._renew()
        self.refuse = ""
        command = [sys.executable, "-m", "laminar.workers.relay", "--controller", self.url, "--name", self.name]
        environment = os.environ | {"LAMINAR_TOKEN": TOKEN}
        command += ["--listen", "127.0.0.1", *self.options]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def holds(self, version: Version) -> bool:
        """Whether it gives these very bytes to a reader, which it must hold. Blocks."""
        with RelayClient(self.directory, READ_LIMIT_S).lease(version) as lease:
            lease.verify()
            return bytes(lease.buffer[: self.cluster.num_bytes]) == content(version, self.cluster.num_bytes).tobytes()

    def cut(self) -> None:
        """From now on the controller and it cannot reach each other."""
        self.cut_off = True
        self.drop()

    async def end(self) -> None:
        self.client.close()
        if self.process is not None:
            for number in (signal.SIGCONT, signal.SIGTERM):
                self.process.send_signal(number)
            _, log = await asyncio.to_thread(self.process.communicate, timeout=LIMIT_S)
            self.logs.append(log)
        await self.stop()
        paths.remove(self.directory)

    def _renew(self) -> None:
        session = _NamedSession(wire.ControllerEnvelope)
        session.run_id = self.run_id
        self.session = session

    async def _channel(self, request: web.Request) -> web.StreamResponse:
        if self.cut_off:
            return web.Response(status=503)
        return await super()._channel(request)

    async def _serve(self, ws: web.WebSocketResponse, hello: wire.Hello) -> None:
        self.incarnation = hello.incarnation
        self.cluster.send(events.WorkerReturned(worker=self.worker, incarnation=hello.incarnation))
        try:
            await super()._serve(ws, hello)
        finally:
            self.cluster.send(events.WorkerDisconnected(worker=self.worker, incarnation=hello.incarnation))

    def _take(self, message: wire.Message) -> None:
        super()._take(message)
        self.cluster.heard(self, message)


class Cluster(Driver):
    """Relays r0, r1, …; `members` by name, `order` as they are chained."""

    def __init__(
        self, num_relays: int, *, restarts: int = 0, num_bytes: int = 24 << 20, link_timeout_s: float = LINK_TIMEOUT_S
    ) -> None:
        core = settings(
            steps=NUM_STEPS, batch_groups=1, local_batch_groups=1, buffer_groups_max=4, relay_restarts_max=restarts
        )
        super().__init__(core)
        self.config = Config(
            controller=ControllerConfig(heartbeat_s=0.2, heartbeat_timeout_s=20.0, orphan_timeout_s=60.0),
            relay=RelayConfig(link_timeout_s=link_timeout_s, deltas="never"),
        )
        self.num_bytes = num_bytes
        self.members = {f"r{number}": Member(self, f"r{number}") for number in range(num_relays)}
        self.may_commit = asyncio.Event()
        """Publications wait for it before their commit."""
        self.may_commit.set()
        self.alarms: list[str] = []
        self.failures: list[BaseException] = []
        """Of tasks that play a part of the world; the world waits for what they had to say."""
        self._addresses: dict[WorkerId, int] = {}
        self._proxies: dict[tuple[WorkerId, WorkerId], Proxy] = {}
        self._changed = asyncio.Event()
        self._blocked: dict[WorkerId, tuple[str, ...]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._masters: dict[int, str] = {}

    # ---- what tests look at

    @property
    def order(self) -> list[Member]:
        """As the core has chained them."""
        return [self.members[worker] for worker in self.core.state.chain.order]

    def proxy(self, upstream: Member, downstream: Member) -> Proxy:
        """What lies between two relays when they are neighbours."""
        key = (upstream.worker, downstream.worker)
        if key not in self._proxies:
            self._proxies[key] = Proxy(self._addresses[downstream.worker])
            self._block(*key)
        return self._proxies[key]

    def block(self, member: Member, *directions: str) -> None:
        """Lose what goes ``out`` of a host to other relays, or comes ``in``. None: nothing is lost any more."""
        self._blocked[member.worker] = directions
        for key in self._proxies:
            self._block(*key)

    def _block(self, upstream: WorkerId, downstream: WorkerId) -> None:
        proxy, blocked = self._proxies[upstream, downstream], self._blocked
        proxy.forward_blocked = "out" in blocked.get(upstream, ()) or "in" in blocked.get(downstream, ())
        proxy.backward_blocked = "in" in blocked.get(upstream, ()) or "out" in blocked.get(downstream, ())

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for it. Raises what a task of the test raised: nobody else would answer in its place."""
        try:
            async with asyncio.timeout(LIMIT_S):
                self._changed.clear()
                while not condition():  # it may be looking at it that makes a change
                    await self._changed.wait()
                    self._changed.clear()
                    if self.failures:
                        raise self.failures[0]
        except TimeoutError:
            raise AssertionError(f"waited for {LIMIT_S:g} s: {self._describe()}") from None

    def _describe(self) -> str:
        """Where everything is, in one line."""
        state = self.core.state
        replicas = [f"{r.id} {r.state} {r.version} → {r.target} at {len(r.attempts)}" for r in state.replicas.values()]
        relays = [f"{relay.id} {relay.held}" for relay in state.relays.values()]
        last = state.versions[-1] if state.versions else None
        return (
            f"step {state.trainer.step}, running {state.trainer.running}, {len(state.buffer)} groups complete; "
            f"{state.chain.order}; {'; '.join([*replicas, *relays])}; {last}; {self.alarms}"
        )

    async def converged(self, version: Version) -> None:
        """Wait until every relay that is left holds the version, or a newer one, for which one between is skipped; its bytes are
        compared then."""
        await self.until(lambda: all(self._held(relay, version) for relay in self.core.state.relays.values()))
        for member in self.order:
            held = self._held(self.core.state.relays[member.worker], version)
            assert held is not None
            assert await asyncio.to_thread(member.holds, held), f"{member.name} holds other bytes"

    def _held(self, relay: Relay, version: Version) -> Version | None:
        """What the relay has of the version or after it."""
        state = self.core.state
        return next((held for held in relay.held if held == version or versions.is_newer(state, held, version)), None)

    async def flows(self, member: Member, version: Version) -> None:
        """Wait until some of the version is in that relay."""
        while True:
            status = await asyncio.to_thread(member.client.status)
            if any(slot.version == version for slot in status.slots):
                return
            await asyncio.sleep(0.002)

    async def settled(self) -> None:
        """Wait until nothing is being published."""
        await self.until(lambda: not self.core.state.versions[-1].deadline)

    async def train(self) -> Version:
        """One more step; its version is being published when this returns."""
        await self.until(lambda: self.core.state.trainer.running or self._generate())
        running = self.all(actions.StartTrainStep)[-1]
        self.send(events.StepFinished(step=running.step, attempt=running.attempt))
        return self.all(actions.PublishVersion)[-1].version

    async def publish(self) -> Version:
        """The same, until every relay has it."""
        version = await self.train()
        await self.converged(version)
        return version

    # ---- the controller

    def send(self, event: events.AnyEvent, after: float = 0.0) -> list[actions.AnyAction]:
        """An event to the core now, its actions to the world. None of these answers before this returns."""
        new = super().send(event, after=time.monotonic() - self.at)
        for action in new:
            perform = getattr(self, f"_on_{type(action).__name__}", None)
            if perform is not None:
                perform(action)
        self._changed.set()
        return new

    def heard(self, member: Member, message: wire.Message) -> None:
        """A relay said something."""
        if isinstance(message, wire.RelayReady):
            self._addresses[member.worker] = message.chain_port
            for key in [key for key in self._proxies if key[1] == member.worker]:
                self._proxies.pop(key).close()
        event = Origin(member.worker, member.incarnation, member.host).to_event(message)
        if event is not None:
            self.send(event)

    async def start(self) -> None:
        """v0 is everywhere, and a replica on every host generates under it."""
        for member in self.members.values():
            await member.start()
            self.launch(member)
        self.at = time.monotonic()
        self.send(events.RunStarted(boot=1))
        await self.until(lambda: len(self._addresses) == len(self.members))
        # On none of these hosts: the relay of its own could not be lost for good. It publishes to whichever it is told.
        trainer = events.TrainerRankReady(
            worker=WorkerId("trainer-0/0"), incarnation=1, rank=0, world_size=1, step=0, host="h-trainer"
        )
        self.send(trainer)
        await self.converged(Version(0, 0))
        for member in self.members.values():
            joined = events.ReplicaJoined(
                worker=WorkerId(member.replica),
                incarnation=1,
                host=member.host,
                num_requests_max=64,
                kv_tokens_max=10_000,
            )
            self.send(joined)
        self._own(self._tick())

    def launch(self, member: Member) -> None:
        """A process, whose end is told."""
        member.launch()
        assert member.process is not None
        self._own(self._watch(member, member.process))

    async def close(self) -> None:
        """Leaves nothing."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for proxy in self._proxies.values():
            proxy.close()
        for member in self.members.values():
            await member.end()

    async def _tick(self) -> None:
        while True:
            deadline = self.core.next_deadline()
            if deadline is not None and deadline <= time.monotonic():
                self.send(events.TimerFired())
            await asyncio.sleep(0.02)

    async def _watch(self, member: Member, process: "subprocess.Popen[str]") -> None:
        while process.poll() is None:  # noqa: ASYNC110 - nobody is told of the end of a process
            await asyncio.sleep(0.01)
        self.send(
            events.WorkerLost(
                worker=member.worker, incarnation=member.incarnation, reason=f"ended with status {process.returncode}"
            )
        )

    def _own(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)
            self._changed.set()

    # ---- actions

    def _on_ArrangeChain(self, action: actions.ArrangeChain) -> None:
        assert self._masters.setdefault(action.epoch, action.master) == action.master, "two masters in one epoch"
        for at, worker in enumerate(action.order):
            upstream = action.order[at - 1] if at else None
            downstream = None
            if at + 1 < len(action.order):
                peer = self.members[action.order[at + 1]]
                port = self.proxy(self.members[worker], peer).port
                downstream = wire.Neighbour(name=peer.name, host="127.0.0.1", port=port)
            message = wire.ArrangeChain(epoch=action.epoch, upstream=upstream, downstream=downstream)
            self._own(self.members[worker].send(message))

    def _on_PublishVersion(self, action: actions.PublishVersion) -> None:
        self._own(self._publish(self.members[self.core.state.publishing_to], action.version, action.publication))

    async def _publish(self, master: Member, version: Version, publication: int) -> None:
        try:
            with RelayClient(master.directory, LIMIT_S) as client:
                manifest = manifest_of(self.num_bytes)
                buffer = await asyncio.to_thread(client.begin, version, manifest, 0, 1, publication=publication)
                if buffer is None:
                    raise RelayError("superseded by a newer publication: no slot is free")
                buffer[: self.num_bytes] = memoryview(content(version, self.num_bytes))
                await self.may_commit.wait()
                client.commit(version)
        except LaminarError as error:
            self.send(events.VersionLost(version=version, reason=str(error), publication=publication))

    def _on_PullWeights(self, action: actions.PullWeights) -> None:
        self._own(self._pull(action.worker, action.version))

    async def _pull(self, worker: WorkerId, version: Version) -> None:
        replica = self.core.state.replicas[worker]
        member = next(each for each in self.members.values() if each.replica == worker)
        relays = self.core.state.relays
        giver = member if member.worker in relays else self.members[self.core.state.chain.master or "r0"]
        try:
            assert await asyncio.to_thread(giver.holds, version), f"{worker} read other bytes of {version}"
        except LaminarError as error:
            failed = events.ReplicaRefreshFailed(
                worker=worker, incarnation=replica.incarnation, version=version, reason=str(error)
            )
            self.send(failed)
            return
        record = versions.find(self.core.state, version)
        assert record is not None
        done = events.ReplicaRefreshed(
            worker=worker, incarnation=replica.incarnation, version=version, digest=record.digest, wait_s=0.1
        )
        self.send(done)

    def _on_StartWorker(self, action: actions.StartWorker) -> None:
        member = self.members[action.worker]
        if member.process is not None and member.process.poll() is None:
            member.process.kill()  # as the launcher does with one that was given up
        self._own(self.relaunch(member))

    async def relaunch(self, member: Member) -> None:
        """A new process in place of one that has ended or was told to."""
        assert member.process is not None
        _, log = await asyncio.to_thread(member.process.communicate, timeout=LIMIT_S)
        member.logs.append(log)
        self._addresses.pop(member.worker, None)
        self.launch(member)

    def _on_StopWorker(self, action: actions.StopWorker) -> None:
        member = self.members.get(action.worker)
        if member is not None and member.incarnation == action.incarnation:
            member.refuse = action.reason
            member.drop()

    def _on_RaiseAlarm(self, action: actions.RaiseAlarm) -> None:
        self.alarms.append(f"{action.name}: {action.text}")

    def _generate(self) -> bool:
        """Whatever replicas generate is completed; nothing is said about the outcome."""
        for member in self.members.values():
            if WorkerId(member.replica) in self.core.state.replicas and self.generating(member.replica):
                here = self.generating(member.replica)
                self.report(member.replica, {t: 3 for t in here}, finish=here, reward={t: 1.0 for t in here})
        return False


@contextlib.asynccontextmanager
async def cluster(num_relays: int, **options: Any) -> AsyncIterator[Cluster]:
    """Relays, none of which may have failed inside."""
    made = Cluster(num_relays, **options)
    try:
        await made.start()
        yield made
    finally:
        await made.close()
    for member in made.members.values():
        for log in member.logs:
            assert "Traceback" not in log, log
    assert not made.failures
