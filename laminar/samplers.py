"""The user's own sampler: made from a reference, and asked for a choice. It may raise or return anything; docs/samplers.md.

Invariant: whatever the user's code does, `load` raises nothing but ConfigError, and `GuardedSampler.ask` gives an answer.
"""

import time
from typing import Annotated, Any, cast

import msgspec

from laminar.core.actions import AskSampler
from laminar.core.events import SamplerAnswered
from laminar.core.sampling import Sampler
from laminar.errors import ConfigError
from laminar.plugins import load_object

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def load(reference: str, what: str) -> Sampler:
    """One sampler of the class that `reference` names; `what` = the option that named it. Raises ConfigError."""
    heading = f'{what} = "{reference}"'
    factory = load_object(reference, what)
    try:
        sampler = factory()
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ConfigError(
            f"{heading}: making one without arguments failed: {type(error).__name__}: {error}; see docs/samplers.md"
        ) from error
    missing = [name for name in ("select", "state", "load_state") if not callable(getattr(sampler, name, None))]
    if missing:
        raise ConfigError(f"{heading} has no method {', '.join(missing)}; see docs/samplers.md for the three it needs")
    return cast(Sampler, sampler)


class GuardedSampler:
    """A sampler of which any call may fail."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self._loaded = sampler, False

    def ask(self, action: AskSampler) -> SamplerAnswered:
        """Its choice, or what went wrong."""
        method, name = "load_state", type(self._sampler).__name__
        try:
            if not self._loaded and action.state:
                self._sampler.load_state(msgspec.msgpack.decode(action.state))
            self._loaded = True
            began, method = time.perf_counter(), "select"
            chosen: Any = self._sampler.select(action.view, action.num_groups)
            elapsed_ms, method = 1e3 * (time.perf_counter() - began), "state"
            state = msgspec.msgpack.encode(self._sampler.state())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; policy decides
            fault = f"{name}.{method} raised {type(error).__name__}: {error}"
            return SamplerAnswered(request=action.request, error=fault)
        try:
            groups: Any = msgspec.convert(chosen if isinstance(chosen, list | tuple) else None, list[_Id])
        except msgspec.ValidationError:
            fault = f"{name}.select returned {_shown(chosen)}, expected a list of group ids"
            return SamplerAnswered(request=action.request, error=fault)
        return SamplerAnswered(request=action.request, groups=groups, elapsed_ms=elapsed_ms, state=state)


def _shown(value: object) -> str:
    """What a value is, in a few words; its repr may be long, or user code that raises."""
    inner = f" of {type(value[0]).__name__}" if isinstance(value, list) and value else ""
    return f"a {type(value).__name__}{inner}"
