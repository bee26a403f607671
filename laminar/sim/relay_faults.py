"""Faults of relays: what breaks, how it is noticed, and when it comes back. `laminar.sim.faults` names them and draws when."""

from random import Random

from laminar.core import events
from laminar.ids import WorkerId
from laminar.sim.relays import Daemon
from laminar.sim.world import SimulationError, World

RELAY_FAULTS = ("relay_crash", "master_crash", "link_slow", "relay_partition")
SLOW_FACTOR = 10.0


class RelayFaults:
    """Strikes at one relay. `heals_s`: how long a link is slow, or a relay cut off."""

    def __init__(self, world: World, random: Random, heals_s: float) -> None:
        self.world, self.random, self.heals_s = world, random, heals_s

    def strike(self, name: str, worker: WorkerId | None = None) -> bool:
        """Break `worker`, else one that chance chooses. False if there is nothing to break."""
        master = self.world.core.state.chain.master
        able = [w for w, daemon in self.world.relays.daemons.items() if daemon.connected]
        if name == "master_crash":
            able = [w for w in able if w == master]
        elif name != "relay_partition":
            able = [w for w in able if w != master]
        if worker is None and able:
            worker = self.random.choice(able)
        daemon = self.world.relays.daemons.get(worker) if worker else None
        if daemon is None or daemon.worker not in able:
            return False
        if name == "link_slow":
            self._slow(daemon)
        elif name == "relay_partition":
            self._cut(daemon)
        else:
            self._crash(daemon)
        return True

    def _crash(self, daemon: Daemon) -> None:
        self.world.relays.kill(daemon.worker)
        reason = "its process ended with signal 9"
        self.world.send(events.WorkerLost(worker=daemon.worker, incarnation=daemon.incarnation, reason=reason))

    def _slow(self, daemon: Daemon) -> None:
        daemon.slowness = SLOW_FACTOR
        self.world.relays.stall(daemon.worker)

        def heal() -> None:
            daemon.slowness = 1.0

        self.world.after(self.heals_s, heal)

    def _cut(self, daemon: Daemon) -> None:
        daemon.connected = False
        self.world.relays.absent_until[daemon.worker] = self.world.now + self.heals_s
        self.world.relays.stall(daemon.worker)
        self.world.send(events.WorkerDisconnected(worker=daemon.worker, incarnation=daemon.incarnation))
        self.world.after(self.heals_s, lambda: self._heal(daemon))

    def _heal(self, daemon: Daemon) -> None:
        """Back in time it goes on; too late it is refused, and another process has its place or will."""
        world, worker = self.world, daemon.worker
        if world.core.state.finished:
            return
        if daemon.given_up:
            world.send(events.RelayJoined(worker=worker, incarnation=daemon.incarnation, host="returned"))
            taken = world.core.state.relays.get(worker)
            if taken is not None and taken.incarnation == daemon.incarnation:
                raise SimulationError(f"{worker} was given up, returned with its old incarnation, and was taken back")
            return
        if world.relays.daemons.get(worker) is daemon:
            daemon.connected = True
            world.send(events.WorkerReturned(worker=worker, incarnation=daemon.incarnation))
            world.relays.stall(worker)
