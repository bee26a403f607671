"""The console's command `sampler`: another sampler from now on, loaded before anything is changed.

Loading is importing user code, which may take long or hang: it is done in a thread, and the console is answered at once. What
comes of it is told like an alarm: ``sampler-changed`` when batches are chosen by it, ``sampler-refused`` with the reason.
"""

import asyncio
from collections.abc import Callable

import msgspec

from laminar import plugins
from laminar.console.answers import Answer, Change
from laminar.console.commands import change
from laminar.console.view import View
from laminar.controller.runtime import Runtime
from laminar.core import events
from laminar.core.amend import FIFO
from laminar.errors import ConfigError
from laminar.samplers import Samplers

LOAD_S = 60.0  # importing torch takes ten seconds on a slow disk


class SamplerChange:
    """One at a time: while a sampler is being loaded, others are refused."""

    def __init__(self, runtime: Runtime, samplers: Samplers, alarm: Callable[[str, str], None]) -> None:
        self._runtime, self._samplers, self._alarm = runtime, samplers, alarm
        self._loading = self._refused = ""

    def choose(self, view: View, words: list[str]) -> Answer | Change:
        """`sampler [REFERENCE]`."""
        if not words:
            return msgspec.structs.replace(change.sampler(view, words), lines=self._told())
        if self._loading:
            return Answer(error=f"{self._loading} is being loaded; say it again when that is over")
        if words == [FIFO]:
            self._refused = ""
            return change.sampler(view, words)
        self._loading, self._refused = plugins.absolute(words[0]), ""
        self._runtime.own(self._load(self._loading), f"sampler-{self._loading}")
        return Answer(lines=self._told())

    def _told(self) -> list[str]:
        """What is under way, or how the last one fared."""
        then = "it chooses the batches from then on, unless that fails: `sampler` says so"
        return (
            [f"{self._loading} is being loaded; {then}"] if self._loading else [self._refused] if self._refused else []
        )

    async def _load(self, reference: str) -> None:
        try:
            async with asyncio.timeout(LOAD_S):
                await asyncio.to_thread(self._samplers.prepare, reference)
        except (ConfigError, TimeoutError) as error:
            reason = str(error) or f"it was not imported within {LOAD_S:g} s"
            self._refused = f"{reference} does not choose batches: {reason}; nothing is changed"
            self._alarm("sampler-refused", self._refused)
        else:
            self._runtime.post(events.SamplerChanged(reference=reference))
        finally:
            self._loading = ""
