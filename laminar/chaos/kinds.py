"""The kinds of faults: what each strikes, what it may cost by the fault table (docs/chaos.md), and how long it lasts.

What is done to the run is in `laminar.chaos.harm`, how it is noticed in `laminar.chaos.signs`.
"""

import random
from typing import Literal

import msgspec

from laminar.chaos.roster import Roster
from laminar.config import Config

Role = Literal[
    "rollout", "relay", "rank", "trainer", "controller", "channel", "process", "reward", "disk", "version", "host"
]
Part = Literal["rollout", "relay", "trainer"]
"""What is started again as a whole, within a limit of its own (`*.restarts`)."""

STRIKES: dict[Role, str] = {
    "rollout": "a rollout worker",
    "relay": "a relay",
    "rank": "one trainer rank",
    "trainer": "all trainer ranks",
    "controller": "the controller",
    "channel": "a worker's connection to the controller",
    "process": "a worker, or the controller",
    "reward": "a rollout worker's reward process",
    "disk": "the file system of the run's directory",
    "version": "a relay's newest weights",
    "host": "a host in a network namespace of this machine",
}
OF_FAULTS = frozenset(
    (
        "version_gone",
        "replica_lost",
        "engine_error",
        "checkpoint_lost",
        "reward_crash",
        "reward_not_started",
        "reward_timeout",
        "agent_killed",
        "agent_not_started",
        "incomplete_group",
    )
)
"""Reasons of dropped trajectories and tokens that come of faults; others are the run's own (a stop, staleness, bad data)."""
_ROLLOUT_LOST = frozenset(("version_gone", "replica_lost", "engine_error"))
_REWARD_LOST = frozenset(("reward_crash", "reward_not_started", "reward_timeout", "agent_killed", "incomplete_group"))
BEYOND = (1.4, 2.2)
"""Times the limit of silence: the first is noticed and comes back; after the second the process has been given up."""
ORPHAN_SHARE = 0.4  # of the time that workers wait for a controller


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of fault."""

    name: str
    what: str
    """For `--help` and the docs."""
    role: Role
    weight: int = 1
    """How often it is drawn."""
    lasts_s: tuple[float, float] | None = None
    """Shortest and longest that is drawn; None = it is over at once."""
    outlasts: bool = False
    """Also drawn longer than silence is forgiven."""
    kills: tuple[Part, ...] = ()
    """Parts that have to join again."""
    may_lose: tuple[Part, ...] = ()
    """Parts that may count as lost because of it."""
    must_be_noticed: bool = True
    cost: str = "nothing"
    """By the fault table."""
    allowed: frozenset[str] = frozenset()
    """Reasons of `OF_FAULTS` that it may give."""
    own_run: bool = False
    """Only in a run that the tool has started: it could not be undone."""

    @property
    def lasts(self) -> bool:
        """Whether it has a duration."""
        return self.lasts_s is not None

    @property
    def strikes(self) -> str:
        """For people."""
        return STRIKES[self.role]

    def targets(self, roster: Roster) -> list[str]:
        """What it can strike."""
        found: dict[Role, list[str]] = {
            "rollout": roster.rollouts,
            "reward": roster.rollouts,
            "relay": roster.relays,
            "version": roster.relays,
            "rank": roster.ranks,
            "trainer": ["trainer"] if roster.ranks else [],
            "controller": ["controller"],
            "channel": roster.workers,
            "process": [*roster.workers, "controller"],
            "disk": ["disk"],
            "host": roster.others,
        }
        return found[self.role]

    def draw_duration_s(self, config: Config, rolls: random.Random) -> float:
        """How long it lasts this time."""
        if self.lasts_s is None:
            return 0.0
        low, high = self.lasts_s
        drawn = rolls.uniform(low, high)
        if self.outlasts and rolls.random() < 0.5:
            drawn += rolls.choice(BEYOND) * config.controller.heartbeat_timeout_s
        if self.role == "controller":
            drawn = min(drawn, ORPHAN_SHARE * config.controller.orphan_timeout_s)
        return round(drawn, 2)


_SINCE_FLUSH = "tokens since the last flush"
_SINCE_SAVED = "steps since the checkpoint, redone"
_ALL = (
    Kind(name="kill_rollout", what="SIGKILL", role="rollout", weight=2, kills=("rollout",), may_lose=("rollout",),
         cost=_SINCE_FLUSH, allowed=_ROLLOUT_LOST),
    Kind(name="stop_rollout", what="SIGSTOP, then SIGCONT", role="rollout", weight=2, lasts_s=(1, 4), outlasts=True,
         may_lose=("rollout",), must_be_noticed=False, cost=_SINCE_FLUSH, allowed=_ROLLOUT_LOST),
    Kind(name="kill_relay", what="SIGKILL", role="relay", kills=("relay",), may_lose=("relay",),
         cost="a version that was being published"),
    Kind(name="stop_relay", what="SIGSTOP, then SIGCONT", role="relay", lasts_s=(0.3, 4), outlasts=True, may_lose=("relay",),
         must_be_noticed=False, cost="a version that was being published"),
    Kind(name="kill_rank", what="SIGKILL", role="rank", kills=("trainer",), may_lose=("trainer",), cost=_SINCE_SAVED),
    Kind(name="stop_rank", what="SIGSTOP, then SIGCONT", role="rank", lasts_s=(1, 4), outlasts=True, may_lose=("trainer",),
         must_be_noticed=False, cost=_SINCE_SAVED),
    Kind(name="kill_trainer", what="SIGKILL", role="trainer", kills=("trainer",), may_lose=("trainer",), cost=_SINCE_SAVED),
    Kind(name="stop_trainer", what="SIGSTOP, then SIGCONT", role="trainer", lasts_s=(1, 4), may_lose=("trainer",),
         must_be_noticed=False, cost=_SINCE_SAVED),
    Kind(name="kill_controller", what="SIGKILL, then --resume", role="controller", weight=2, lasts_s=(0.1, 3), own_run=True,
         must_be_noticed=False),
    Kind(name="stop_controller", what="SIGSTOP, then SIGCONT", role="controller", lasts_s=(0.5, 8), must_be_noticed=False),
    Kind(name="kill_reward", what="SIGKILL", role="reward", cost="that attempt", allowed=_REWARD_LOST, must_be_noticed=False),
    Kind(name="slow", what="stopped and let go, ten times a second", role="process", weight=2, lasts_s=(3, 8),
         must_be_noticed=False),
    Kind(name="cut", what="its sockets are destroyed (ss -K)", role="channel", weight=2),
    Kind(name="drop_frames", what="what it says is lost in the kernel, then the connection breaks", role="channel", weight=2,
         lasts_s=(0.3, 2), outlasts=True),
    Kind(name="fill_disk", what="not a byte is left, then all is", role="disk", lasts_s=(2, 6), own_run=True,
         must_be_noticed=False),  # the log may write for seconds where it has written before
    Kind(name="corrupt", what="bytes of it are flipped", role="version", cost="that version, which nobody may use",
         must_be_noticed=False),
    Kind(name="partition", what="its interfaces go down, then up", role="host", lasts_s=(1, 6), outlasts=True,
         may_lose=("rollout", "relay", "trainer"), must_be_noticed=False, cost=_SINCE_FLUSH, allowed=_ROLLOUT_LOST),
)  # fmt: skip
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
