"""Messages of every worker's session, whatever its role: greeting, heartbeat, end."""

import msgspec

from laminar.ids import WorkerId

PROTOCOL = 3


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""


# ---- worker -> controller ----------------------------------------------------------------------------------


HOST_VARIABLE = "LAMINAR_HOST"
"""Environment variable with a worker's host as the hosts file names it, set in runs on several; else the machine's own name."""


ADDRESS_VARIABLE = "LAMINAR_ADDRESS"
"""Environment variable with the address at which other hosts reach a trainer's host, set where it has several."""


INCARNATION_VARIABLE = "LAMINAR_INCARNATION"
"""Environment variable with the lowest incarnation that a worker may have, given to one that is started again."""


RENDEZVOUS_VARIABLE = "LAMINAR_RENDEZVOUS"
"""Environment variable with the path of a file in the run's directory that holds the controller's present URL."""


HOST_RENDEZVOUS_VARIABLE = "LAMINAR_HOST_RENDEZVOUS"
"""The same of a file on the worker's own host, if it has a supervisor there, which is told by the controller. The worker touches
it as long as it hears from its controller."""


ORPHAN_VARIABLE = "LAMINAR_ORPHAN_TIMEOUT_S"
"""Environment variable with `controller.orphan_timeout_s`, for a worker whose controller dies before it has answered."""


class Hello(Message, frozen=True, kw_only=True):
    """First frame of a worker, on every (re)connect."""

    protocol: int
    worker: WorkerId
    role: str
    """``rollout``, ``trainer`` or ``relay``."""
    incarnation: int
    """Start time of the worker process in ms since the epoch: a restarted worker's is higher."""
    boot: int = 0
    """Boot number of the controller last spoken to, 0 if none."""
    received: int = 0
    """Highest frame number received from the controller in this session."""
    pid: int = 0
    host: str = ""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Unreliable, both ways, every `heartbeat_s`. Also carries acknowledgements (in the envelope)."""

    lag_s: float = 0.0


class WorkerFailed(Message, frozen=True, kw_only=True):
    """The worker cannot go on and exits after this frame."""

    reason: str
    """One line for people."""
    detail: str = ""
    """Traceback or the last log lines."""


class Goodbye(Message, frozen=True, kw_only=True):
    """The worker stops because it was told to; the loss of its channel is no fault."""


class Stacks(Message, frozen=True, kw_only=True):
    """Unreliable answer to `AskStacks`: what the worker's threads and tasks are at, for people (`laminar.stacks`)."""

    request: int
    text: str


# ---- controller -> worker ----------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to Hello. A worker refuses a boot number lower than one it has seen."""

    protocol: int
    boot: int
    run_id: str
    received: int
    """Highest frame number received from this worker's session."""
    continues: int = 0
    """This controller goes on with the sessions of all boots from this one on; 0 = it knows none but its own."""
    config: bytes
    """msgpack of `laminar.config.Config`, resolved."""


class Refused(Message, frozen=True, kw_only=True):
    """Answer to Hello; the worker exits and shows the reason."""

    reason: str


class Stop(Message, frozen=True, kw_only=True):
    """Say Goodbye, clean up, exit 0."""

    reason: str


class AskStacks(Message, frozen=True, kw_only=True):
    """Unreliable; the link answers by itself with `Stacks`, also while the worker is busy elsewhere."""

    request: int


FromAny = Hello | Heartbeat | WorkerFailed | Goodbye | Stacks
ToAny = Welcome | Refused | Stop | Heartbeat | AskStacks
