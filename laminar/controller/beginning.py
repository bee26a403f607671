"""The state with which a controller begins: a new run's, that of a checkpoint, or that of the controller which died."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import msgspec

from laminar import checkpoints, samplers
from laminar.controller.recovery import History
from laminar.core import amend, resume
from laminar.core.engine import Core
from laminar.core.sampling import Sampler
from laminar.core.settings import Settings
from laminar.errors import ConfigError, StartError


class Beginning(NamedTuple):
    """What the parts of a run are made of."""

    core: Core
    sampler: Sampler | None
    """None = FIFO."""
    checkpoint: Path | None = None
    """From which a trainer without a newer one goes on."""
    data_state: bytes = b""
    """Of it, as far as the core was made of that."""
    damaged: dict[Path, str] = {}  # noqa: RUF012
    """Newer checkpoints that cannot be used, and why."""

    def told(self) -> str:
        """What an operator had changed and goes on to be so, for people; empty = nothing."""
        if not (changed := amend.in_words(self.core.state)):
            return ""
        then = "; KEY=VALUE after --resume wins over it" if self.data_state else ""
        return f"goes on with what an operator has changed: {', '.join(changed)}{then}"


def begin(
    settings: Settings,
    sampler: Sampler | None,
    *,
    history: History | None,
    checkpoint: Path | None,
    named: Collection[str] = (),
) -> Beginning:
    """`history`: of the controller that died; `checkpoint`: the newest one of a run that ended; `named`: keys of the configuration
    that whoever resumes it has given anew. Raises StartError, ConfigError."""
    if history is not None:
        return Beginning(Core.restore(settings, history.snapshot.core), sampler, checkpoint)
    if checkpoint is None:
        return Beginning(Core(settings), sampler)
    found = checkpoints.newest_data_state(checkpoint)
    try:
        data_state = amend.overruled(found.data_state, named)
        core = _resumed(settings, data_state)
    except msgspec.MsgspecError as error:
        raise StartError(f"cannot resume from {found.path}: {checkpoints.DATA_STATE}: {error}") from error
    chosen = core.state.sampler
    return Beginning(core, _loaded(chosen) if chosen else sampler, found.path, data_state, found.damaged)


def _resumed(settings: Settings, data_state: bytes) -> Core:
    try:
        return Core.resumed(settings, data_state)
    except ConfigError as error:
        saved = resume.decode(data_state)
        if not (saved.amended or saved.replica_settings):
            raise
        then = (
            "with what an operator had changed before the checkpoint; give KEY=VALUE after --resume for what is wrong"
        )
        raise ConfigError(f"{error}\n{then}") from error


def _loaded(reference: str) -> Sampler | None:
    """What an operator had chosen."""
    if reference == amend.FIFO:
        return None
    try:
        return samplers.load(reference, "sampler")
    except ConfigError as error:
        then = f"an operator had chosen it before the checkpoint: mend it, or resume with {amend.SAMPLER}=fifo or another one"
        raise ConfigError(f"{error}; {then}") from error
