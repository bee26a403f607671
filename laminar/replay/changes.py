"""What a what-if changes: settings of the core by the configuration's keys or their own names, and the machines."""

import difflib
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from laminar.core.amend import CHANGEABLE
from laminar.core.settings import Settings
from laminar.errors import ConfigError

KEYS = {key: name for name, key in CHANGEABLE.items()} | {
    "trainer.batch_prompts": "batch_groups",
    "rollout.group_size": "group_size",
    "buffer.group_versions": "group_versions",
}
"""Key of the configuration -> setting of the core."""
NOT_SIMULATED = (
    "seed", "num_prompts", "shuffle", "steps", "evaluate", "custom_sampler", "sampler_budget_ms", "on_sampler_error",
    "trajectory_tokens_max", "pinned", "checkpoint_pulls", "stall_after_s",
)  # fmt: skip
"""What the simulated run has from the recorded one, or what has no effect in it."""
MACHINES = ("replicas", "faults", "speed.rollout", "speed.trainer", "buffer.sampler", "repack.enabled")
REPLICAS_MAX = 8192  # up to which the core has been measured


class Changes(NamedTuple):
    """What differs from the recorded run."""

    settings: dict[str, Any] = {}  # noqa: RUF012
    replicas: int = 0
    """0 = as many as there were."""
    faults: bool = True
    """Whether what was lost, drained or joined happens again."""
    rollout_speed: float = 1.0
    trainer_speed: float = 1.0
    sampler: str = ""
    """Empty = FIFO, or the run's own where one is given."""

    def applied(self, settings: Settings) -> Settings:
        """The settings of the changed run."""
        return msgspec.structs.replace(settings, **self.settings)


def parse(words: Iterable[str]) -> Changes:
    """``rollout.refresh_policy=continuous``, ``ready_groups_max=64``, ``replicas=4`` … Raises ConfigError."""
    found = Changes()
    for word in words:
        name, equals, text = word.partition("=")
        if not (equals and text):
            raise ConfigError(f"--whatif {word}: expected key=value, for example rollout.refresh_policy=continuous")
        found = _with(found, name, text, word)
    if found == Changes():
        raise ConfigError("--whatif changes nothing; name key=value, for example rollout.refresh_policy=continuous")
    return found


def _with(found: Changes, name: str, text: str, word: str) -> Changes:
    if name == "replicas":
        return found._replace(replicas=_number(text, int, 1, REPLICAS_MAX, word))
    if name == "faults":
        return found._replace(faults=_one_of(text, {"none": False, "recorded": True}, word))
    if name == "speed.rollout":
        return found._replace(rollout_speed=_number(text, float, 1e-3, 1e3, word))
    if name == "speed.trainer":
        return found._replace(trainer_speed=_number(text, float, 1e-3, 1e3, word))
    if name == "buffer.sampler":
        return found._replace(sampler=text)
    if name == "repack.enabled":
        off = _one_of(text, {"false": 0.0}, word, "; to begin with it, give repack.interval_s")
        return found._replace(settings={**found.settings, "repack_interval_s": off})
    return found._replace(settings={**found.settings, **_setting(name, text, word)})


def _setting(name: str, text: str, word: str) -> dict[str, Any]:
    kinds = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    setting = KEYS.get(name, name)
    if setting in NOT_SIMULATED:
        raise ConfigError(f"--whatif {word}: has no effect in a re-simulation; leave it away")
    if setting not in kinds:
        known = [*KEYS, *MACHINES, *(kind for kind in kinds if kind not in NOT_SIMULATED)]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join([*MACHINES, *KEYS])}"
        raise ConfigError(f"--whatif {word}: there is no {name!r}{hint}")
    value: Any = None if text.lower() in ("none", "null") or (setting == "max_staleness" and text == "-1") else text
    try:
        return {setting: msgspec.convert(value, kinds[setting], strict=False)}
    except msgspec.ValidationError as error:
        raise ConfigError(f"--whatif {word}: {str(error)[:1].lower()}{str(error)[1:]}") from None


def _number(text: str, kind: type, least: float, most: float, word: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ConfigError(f"--whatif {word}: a number from {least:g} to {most:g} is expected")
    return value


def _one_of(text: str, values: dict[str, Any], word: str, hint: str = "") -> Any:
    if text not in values:
        raise ConfigError(f"--whatif {word}: {' or '.join(values)} is expected{hint}")
    return values[text]
