"""The console's command `sampler`: another sampler from now on, loaded before anything is changed.

Loading is importing user code, which may take long or hang: it is done in a thread, and the console is answered at once. What
comes of it is told like an alarm: ``sampler-changed`` when batches are chosen by it, ``sampler-refused`` with the reason.
"""

import asyncio
from collections.abc import Callable

from laminar.console.answers import Answer, Change
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
        self._loading = ""

    def choose(self, view: View, words: list[str]) -> Answer | Change:
        """`sampler REFERENCE`."""
        reference = words[0]
        if reference == FIFO:
            return Change(
                events=[events.SamplerChanged(reference=FIFO)], lines=["batches are taken first in, first out"]
            )
        if self._loading:
            return Answer(error=f"{self._loading} is being loaded; say it again when that is over")
        self._loading = reference
        self._runtime.own(self._load(reference), f"sampler-{reference}")
        return Answer(
            lines=[f"{reference} is being loaded; it chooses the batches from then on, unless that fails: `status`"]
        )

    async def _load(self, reference: str) -> None:
        try:
            async with asyncio.timeout(LOAD_S):
                await asyncio.to_thread(self._samplers.prepare, reference)
        except (ConfigError, TimeoutError) as error:
            reason = str(error) or f"it was not imported within {LOAD_S:g} s"
            self._alarm("sampler-refused", f"{reference} does not choose batches: {reason}; nothing is changed")
        else:
            self._runtime.post(events.SamplerChanged(reference=reference))
        finally:
            self._loading = ""
