"""The user's own sampler: made from a reference, and asked for a choice. It may raise or return anything; docs/samplers.md.

Invariants: whatever the user's code does, `load` raises nothing but ConfigError, and `GuardedSampler.ask` gives an answer in time.
A sampler that is asked no more leaves no thread behind, unless its code never returns.
"""

import queue
import threading
import time
import weakref
from typing import Annotated, Any, cast

import msgspec

from laminar import stacks
from laminar.core.actions import AskSampler
from laminar.core.amend import FIFO
from laminar.core.events import SamplerAnswered
from laminar.core.sampling import Sampler
from laminar.errors import ConfigError
from laminar.plugins import load_object

HANG_S = 2.0  # the event loop waits for it: far beyond any budget of a choice, far below the time limits of channels

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def load(reference: str, what: str, *, fresh: bool = False) -> Sampler:
    """One sampler of the class that `reference` names; `what` = the option that named it; `fresh`: a file is read again. Raises
    ConfigError."""
    heading = f'{what} = "{reference}"'
    if ":" not in reference:
        raise ConfigError(
            f'{heading}: expected "{FIFO}", "pkg.mod:Class" or "path/file.py:Class"; see docs/samplers.md'
        )
    factory = load_object(reference, what, fresh=fresh)
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


class Samplers:
    """The sampler that is asked, and those that an operator may put in its place: each is loaded before it is chosen."""

    def __init__(self, sampler: Sampler | None) -> None:
        """None = FIFO: none is asked."""
        self._asked: GuardedSampler | str = GuardedSampler(sampler) if sampler else "there is none"
        """Or why nobody can be."""
        self._ready: dict[str, Sampler] = {}

    def prepare(self, reference: str) -> None:
        """Load it, a file as it is now. Takes as long as user code takes to import: for a thread. Raises ConfigError."""
        if reference != FIFO:
            self._ready[reference] = load(reference, "sampler", fresh=True)

    def use(self, reference: str) -> None:
        """From now on this one is asked, from a fresh start. One that cannot be loaded (any more) answers with the reason."""
        try:
            if reference not in self._ready:
                self.prepare(reference)
        except ConfigError as error:
            self._put(f"cannot be loaded: {error}")
            return
        self._put(GuardedSampler(self._ready.pop(reference)) if reference != FIFO else "there is none")

    def close(self) -> None:
        """Nobody is asked any more."""
        self._put("the run is over")

    def _put(self, asked: "GuardedSampler | str") -> None:
        """In the place of the one that is asked."""
        if isinstance(self._asked, GuardedSampler):
            self._asked.close()
        self._asked = asked

    def ask(self, action: AskSampler) -> SamplerAnswered:
        """Its choice, or what went wrong."""
        if isinstance(self._asked, str):
            return SamplerAnswered(request=action.request, error=self._asked)
        return self._asked.ask(action)


class GuardedSampler:
    """A sampler of which any call may fail, or not return: it is asked in a thread of its own, always the same.

    Whoever asks waits for `limit_s` at most; a sampler that has not returned by then is left alone, and asked again once it has.
    The thread ends with `close`, or when nobody can ask any more; if the sampler has not returned by then, as soon as it has.
    """

    def __init__(self, sampler: Sampler, limit_s: float = HANG_S) -> None:
        self._answerer, self._limit_s = _Answerer(sampler), limit_s
        self._thread: threading.Thread | None = None
        self._asked_at = 0.0
        self._num_open = 0
        """Questions without an answer: one at most."""
        self._end = weakref.finalize(self, self._answerer.questions.put, None)

    def ask(self, action: AskSampler) -> SamplerAnswered:
        """Its choice, or what went wrong."""
        if not self._end.alive:
            return SamplerAnswered(request=action.request, error="is not asked any more")
        self._collect(0.0)
        if not self._num_open:
            self._put(action)
            answer = self._collect(self._limit_s)
            if answer is not None:
                return answer
        return SamplerAnswered(request=action.request, error=self._hangs())

    def close(self) -> None:
        """Let its thread end; nothing is waited for."""
        self._end()

    def _put(self, action: AskSampler) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._answerer.run, name="sampler", daemon=True)
            self._thread.start()
        self._num_open, self._asked_at = 1, time.monotonic()
        self._answerer.questions.put(action)

    def _collect(self, wait_s: float) -> SamplerAnswered | None:
        answers = self._answerer.answers
        try:
            answer = answers.get(timeout=wait_s) if wait_s else answers.get_nowait()
        except queue.Empty:
            return None
        self._num_open = 0
        return answer

    def _hangs(self) -> str:
        hung_s = time.monotonic() - self._asked_at
        lines = stacks.of_thread(self._thread.ident or 0) if self._thread else []
        own = [index for index, line in enumerate(lines) if line.startswith(f"{__file__}:")]
        place = "".join(f" ({line})" for line in lines[own[-1] + 1 if own else 0 :][:1])
        return (
            f"hangs: {self._answerer.call}{place} has not returned for {hung_s:.1f} s and is "
            "not asked before it has; mend it, or resume with buffer.sampler=fifo"
        )


class _Answerer:
    """What runs in a sampler's thread. It does not know who asks, so that those can be forgotten while it waits."""

    def __init__(self, sampler: Sampler) -> None:
        self.questions: queue.SimpleQueue[AskSampler | None] = queue.SimpleQueue()
        """None = there will be no other."""
        self.answers: queue.SimpleQueue[SamplerAnswered] = queue.SimpleQueue()
        self._sampler, self._method, self._loaded = sampler, "", False

    @property
    def call(self) -> str:
        """Class and method of the user's that is called now, or was last."""
        return f"{type(self._sampler).__name__}.{self._method}"

    def run(self) -> None:
        """Answer one question after the other."""
        while (question := self.questions.get()) is not None:
            self.answers.put(self._answer(question))

    def _answer(self, action: AskSampler) -> SamplerAnswered:
        try:
            self._method = "load_state"
            if not self._loaded and action.state:
                self._sampler.load_state(msgspec.msgpack.decode(action.state))
            self._loaded = True
            began, self._method = time.perf_counter(), "select"
            chosen: Any = self._sampler.select(action.view, action.num_groups)
            elapsed_ms, self._method = 1e3 * (time.perf_counter() - began), "state"
            state = msgspec.msgpack.encode(self._sampler.state())
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; policy decides
            fault = f"{self.call} raised {type(error).__name__}: {error}"
            return SamplerAnswered(request=action.request, error=fault)
        try:
            groups: Any = msgspec.convert(chosen if isinstance(chosen, list | tuple) else None, list[_Id])
        except msgspec.ValidationError:
            fault = f"{type(self._sampler).__name__}.select returned {_shown(chosen)}, expected a list of group ids"
            return SamplerAnswered(request=action.request, error=fault)
        return SamplerAnswered(request=action.request, groups=groups, elapsed_ms=elapsed_ms, state=state)


def _shown(value: object) -> str:
    """What a value is, in a few words; its repr may be long, or user code that raises."""
    inner = f" of {type(value[0]).__name__}" if isinstance(value, list) and value else ""
    return f"a {type(value).__name__}{inner}"
