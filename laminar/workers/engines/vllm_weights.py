"""Weights of a relay's slot into a vLLM server, over its HTTP routes. The other half is `vllm_plugin`, in vLLM's workers.

    pause ─► start ─► check ─► load ─► finish ─► reset ─► resume
               │        │        │        │        │         │
               └────────┴─► resume        └────────┴─────────┴─► the server stays paused, its weights count as broken

Invariants:
* The caller holds the lease of the snapshot until `load` has returned or raised.
* Until `check` was answered well no weight is touched, and a server that refuses goes on with its old ones.
* From `load` on anything but a complete sequence leaves the server paused; a later complete `load` heals it, a restart too.
* Prefix, KV and encoder caches are emptied while the server is paused, so none outlives the weights that made it.
"""

import time
from typing import Any

import aiohttp
import msgspec

from laminar.ids import Version
from laminar.workers.engines.vllm_plugin import BACKEND
from laminar.workers.relay.manifest import Snapshot

WORKER_EXTENSION = "laminar.workers.engines.vllm_plugin.worker.WeightReports"
SERVER_FLAGS = (
    "--weight-transfer-config",
    f'{{"backend": "{BACKEND}"}}',
    "--worker-extension-cls",
    WORKER_EXTENSION,
)
"""What a server needs to be started with."""
SERVER_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""The weight routes exist only with it."""

STEP_S = 60.0  # pausing waits for one decode step, the others for a message to all workers
BYTES_PER_S = 50 << 20  # slower than any digest or load seen by a factor of ten; a load that takes longer hangs
_HEADERS = {"Connection": "close"}  # the server hangs up after an error, and would lose the next step's request
ERROR_CHARS = 2000  # of the server's own text; its first lines say what is wrong


class LoadTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds for which decoding stood still, by what they were spent on."""

    pause_s: float
    """Stopping the scheduler and emptying the caches."""
    check_s: float
    """Mapping, digest, and the rehearsal of a layout that is new. There is no copy: vLLM's loader reads the slot itself."""
    load_s: float
    """vLLM's own loading."""
    finish_s: float
    """Stamp, prefix cache, going on."""

    @property
    def total_s(self) -> float:
        return self.pause_s + self.check_s + self.load_s + self.finish_s


class WeightLoadError(RuntimeError):
    """The weights were not replaced.

    `weights_broken` False: the server refused and generates with its old weights. True: nothing that it generates may
    be used before a complete load or a restart.
    """

    def __init__(self, step: str, reason: str, *, weights_broken: bool) -> None:
        self.step = step
        self.weights_broken = weights_broken
        state = "its weights may be broken: restart it" if weights_broken else "it goes on with its old weights"
        super().__init__(f"vLLM's weight update failed in {step}, {state}. {reason}")


class _StepFailed(Exception):
    def __init__(self, step: str, reason: str, *, answered: bool) -> None:
        super().__init__(reason)
        self.step, self.reason, self.answered = step, reason, answered


class VllmWeights:
    """Replaces the weights of the server at `base_url`. One load at a time; the server has no running requests."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str) -> None:
        self._http = http
        self._base_url = base_url.rstrip("/")
        self.broken = False
        """The server must not be used: a load failed after the old weights were touched, or got no answer."""

    async def load(self, version: Version, snapshot: Snapshot) -> LoadTimes:
        """Replace all weights and stamp `version` on what is generated from now on. Raises WeightLoadError.

        A cancelled load counts as failed where it was.
        """
        offer = _offer(version, snapshot)
        was_broken, self.broken = self.broken, True
        touched = False
        data_s = STEP_S + snapshot.manifest.num_bytes / BYTES_PER_S
        try:
            began = time.monotonic()
            await self._post("pause", "/pause?mode=abort&clear_cache=true", STEP_S)
            paused = time.monotonic()
            if not await self._has_open_update():
                await self._post("start", "/start_weight_update", STEP_S)
            await self._update("check", data_s, offer)
            checked = time.monotonic()
            touched = True
            await self._update("load", data_s, str(version))
            loaded = time.monotonic()
            await self._post("finish", "/finish_weight_update", STEP_S, {"weight_version": str(version)})
            await self._reset_caches()
            await self._post("resume", "/resume", STEP_S)
        except _StepFailed as failure:
            self.broken = touched or was_broken or not (failure.answered and await self._has_resumed())
            raise WeightLoadError(failure.step, failure.reason, weights_broken=self.broken) from failure
        self.broken = False
        return LoadTimes(
            pause_s=paused - began,
            check_s=checked - paused,
            load_s=loaded - checked,
            finish_s=time.monotonic() - loaded,
        )

    async def _has_open_update(self) -> bool:
        """Whether a client began an update and died: vLLM would refuse to start another."""
        return any(report["open"] for report in await self._reports("start"))

    async def _update(self, step: str, limit_s: float, content: object) -> None:
        """One step of the plugin, in all workers."""
        await self._post(step, "/update_weights", limit_s, {"update_info": {step: content}})
        problems = {report["problem"] for report in await self._reports(step)} - {""}
        if problems:
            raise _StepFailed(step, "; ".join(sorted(problems))[:ERROR_CHARS], answered=True)

    async def _reports(self, step: str) -> list[dict[str, Any]]:
        """What each worker says of the last step."""
        try:
            return (await self._post(step, "/collective_rpc", STEP_S, {"method": "laminar_weights"}))["results"]
        except _StepFailed as failure:
            advice = f"; was the server started with {' '.join(SERVER_FLAGS)}?" if failure.answered else ""
            raise _StepFailed(step, failure.reason + advice, answered=failure.answered) from failure

    async def _reset_caches(self) -> None:
        answer = await self._post("reset", "/reset_prefix_cache?reset_external=true", STEP_S)
        if not answer.get("success"):
            raise _StepFailed("reset", f"the prefix cache was not emptied: {answer}", answered=True)

    async def _has_resumed(self) -> bool:
        """Let a server go on whose weights were not touched."""
        try:
            await self._post("resume", "/resume", STEP_S)
        except _StepFailed:
            return False
        return True

    async def _post(self, step: str, route: str, limit_s: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The server's answer. Raises _StepFailed."""
        limit = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._http.post(self._base_url + route, json=body, headers=_HEADERS, timeout=limit) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"no answer within {limit_s:.0f} s" if isinstance(error, TimeoutError) else repr(error)
            raise _StepFailed(step, f"{route.partition('?')[0]}: {reason}", answered=False) from error
        if answer.status != 200:
            raise _StepFailed(step, f"{route.partition('?')[0]} answered {answer.status}: {_told(text)}", answered=True)
        try:
            return msgspec.json.decode(text, type=dict)
        except msgspec.DecodeError as error:
            raise _StepFailed(
                step, f"{route.partition('?')[0]} answered what vLLM does not: {error}", answered=False
            ) from error


def _told(text: str) -> str:
    """The message of an error, which vLLM wraps in JSON."""
    try:
        told = msgspec.json.decode(text)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        told = text
    return str(told)[:ERROR_CHARS]


def _offer(version: Version, snapshot: Snapshot) -> dict[str, Any]:
    """What the plugin's `Offer` reads."""
    if snapshot.path is None or not snapshot.digest:
        raise ValueError(f"{version} is not in a relay's slot: vLLM's workers map its file, and need its digest")
    return {
        "version": str(version),
        "path": str(snapshot.path),
        "digest": snapshot.digest,
        "manifest": msgspec.to_builtins(snapshot.manifest),
    }
