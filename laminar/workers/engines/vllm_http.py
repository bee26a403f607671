"""The HTTP side of a vLLM server: what is asked of it, and whether it is one that can be worked with."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import aiohttp
import msgspec

from laminar.errors import StartError
from laminar.workers.engines import vllm_metrics, vllm_stream
from laminar.workers.engines.base import SamplingParams
from laminar.workers.engines.vllm_plugin import BACKEND
from laminar.workers.engines.vllm_stream import Choice, StreamError
from laminar.workers.engines.vllm_versions import refusal
from laminar.workers.engines.vllm_weights import WORKER_EXTENSION

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
FIRST_ANSWER_S = 120.0  # the first request of a kind compiles kernels
ANSWER_S = 20.0  # an event loop that is busy with hundreds of streams answers within a second
ERROR_CHARS = 500
VERSION = "/version"
NEEDED = {
    "/inference/v1/generate": "--enable-scale-out",
    "/weight_info": "the environment variable VLLM_SERVER_DEV_MODE=1",
}
"""Routes, and what a server was started without if it lacks them."""


class VllmServer(Protocol):
    """A server that was started here, or that somebody else runs."""

    base_url: str

    @property
    def own(self) -> bool:
        """Started here, with flags that are known to fit."""

    def connector(self) -> aiohttp.BaseConnector:
        """How to reach it."""

    async def start(self) -> None:
        """Return once it answers. Raises StartError, with its last lines."""

    async def until_ended(self) -> str:
        """Wait until it has ended; how, with its last lines."""

    async def describe(self, what: str) -> str:
        """`what`, with how it ended if it did, and its last lines."""

    async def stop(self) -> None:
        """End it, if it was started here."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is."""

    context_tokens_max: int
    kv_tokens_max: int
    weight_version: str


class _Model(msgspec.Struct):
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Model]


class Http:
    """One session with a server. Close it."""

    def __init__(self, server: VllmServer, logprobs_mode: str) -> None:
        self._server, self._logprobs_mode = server, logprobs_mode
        self.session = aiohttp.ClientSession(
            connector=server.connector(), timeout=aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S)
        )

    async def close(self) -> None:
        await self.session.close()

    # ---- generation ----------------------------------------------------------------------------------------

    async def generate(self, body: bytes) -> AsyncIterator[Choice]:
        """The events of one answer. Raises StreamError, aiohttp.ClientError."""
        headers = {"Content-Type": "application/json"}
        url = f"{self._server.base_url}/inference/v1/generate"
        async with self.session.post(url, data=body, headers=headers) as answer:
            if answer.status != 200:
                raise StreamError(f"HTTP {answer.status}: {await _message(answer)}")
            events = vllm_stream.Events()
            async for data in answer.content.iter_any():
                for choice in events.feed(data):
                    yield choice

    async def prompt_logprobs(self, tokens: list[int]) -> list[float]:
        """Of `tokens[1:]`, at temperature 1. Raises RuntimeError."""
        body = vllm_stream.prompt_body(tokens)
        headers = {"Content-Type": "application/json"}
        status, text = await self._ask("POST", "/inference/v1/generate", FIRST_ANSWER_S, data=body, headers=headers)
        if status != 200:
            raise RuntimeError(f"vLLM gave no log-probs of a prompt: {status or 'no answer'}: {text[:ERROR_CHARS]}")
        return vllm_stream.prompt_logprobs(text, tokens)

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests; those that are unknown are ignored. A server that does not answer is for others to notice."""
        if request_ids:
            ids = [f"{vllm_stream.ID_PREFIX}{each}" for each in request_ids]
            await self._ask("POST", "/inference/v1/abort_requests", json={"request_ids": ids})

    async def load(self) -> vllm_metrics.Load | None:
        """What the server says of its load; None without an answer."""
        status, text = await self._ask("GET", vllm_metrics.QUERY)
        return vllm_metrics.parse_load(text) if status == 200 else None

    async def sickness(self) -> str:
        """Why the server does not work any more; empty if it says that it does."""
        status, text = await self._ask("GET", "/health")
        if status == 200:
            return ""
        return f"/health answers {status}" if status else f"/health does not answer: {text}"

    # ---- the check at the start ----------------------------------------------------------------------------

    async def check(self) -> Facts:
        """Whether version, routes and flags are the needed ones. Raises StartError that names what is not."""
        version = await self._json(VERSION)
        refused = refusal(str(version.get("version")))
        if refused:
            raise StartError(refused)
        weight_version = (await self._json("/weight_info")).get("weight_version")
        await self._try_generate()
        models = msgspec.convert(await self._json("/v1/models"), _Models)
        _, metrics = await self._ask("GET", vllm_metrics.CACHE_QUERY)
        try:
            kv_tokens_max = vllm_metrics.parse_kv_tokens(metrics)
        except ValueError as error:
            raise StartError(str(error)) from error
        if not self._server.own:
            await self._check_flags()
        return Facts(
            context_tokens_max=models.data[0].max_model_len,
            kv_tokens_max=kv_tokens_max,
            weight_version=str(weight_version),
        )

    async def _try_generate(self) -> None:
        """One token: proves the route, and compiles what the first request compiles."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        body = vllm_stream.body("check", [0], 0, vllm_stream.Leg(1, ()), sampling)
        try:
            async with asyncio.timeout(FIRST_ANSWER_S):
                choices = [choice async for choice in self.generate(body)]
                for choice in choices:
                    vllm_stream.logprobs_of(choice)
        except StreamError as error:
            lacks = _lacking("/inference/v1/generate") if "HTTP 40" in str(error) else "it cannot generate"
            raise StartError(f"the vLLM server is refused, {lacks}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or f"nothing within {FIRST_ANSWER_S:g} s"
            raise StartError(await self._server.describe(f"vLLM does not generate: {reason}")) from error
        if not choices or not choices[-1].weight_versions:
            raise StartError("the vLLM server is refused: its answers do not say which weights generated them")

    async def _check_flags(self) -> None:
        """Of a server that somebody else has started. Slow: the first answer describes the whole machine."""
        config = (await self._json("/server_info?config_format=json", FIRST_ANSWER_S))["vllm_config"]
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        wanted = {
            "--weight-transfer-config": (backend, BACKEND),
            "--worker-extension-cls": (config["parallel_config"]["worker_extension_cls"], WORKER_EXTENSION),
            "--logprobs-mode": (config["model_config"]["logprobs_mode"], self._logprobs_mode),
            "--enable-prefix-caching": (config["cache_config"]["enable_prefix_caching"], True),
        }
        wrong = [f"{flag} is {found}, and {need} is needed" for flag, (found, need) in wanted.items() if found != need]
        if wrong:
            raise StartError(f"the vLLM server at {self._server.base_url} is refused: {'; '.join(wrong)}")

    async def _json(self, route: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        status, text = await self._ask("GET", route, timeout_s)
        if status == 0:
            raise StartError(await self._server.describe(f"vLLM does not answer {route}: {text}"))
        if status != 200 and route == VERSION:  # which every vLLM has
            raise StartError(f"what answers at {self._server.base_url} is no vLLM server: {route} answers {status}")
        if status != 200:
            raise StartError(f"the vLLM server is refused, {_lacking(route)}: {route} answers {status}")
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise StartError(f"what answers at {self._server.base_url}{route} is no vLLM server: {error}") from error

    async def _ask(self, method: str, route: str, timeout_s: float = ANSWER_S, **more: Any) -> tuple[int, str]:
        """(status, text); (0, why) without an answer."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self.session.request(method, f"{self._server.base_url}{route}", **more) as answer:
                    return answer.status, await answer.text()
        except TimeoutError:
            return 0, f"nothing within {timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return 0, str(error) or type(error).__name__


async def _message(answer: aiohttp.ClientResponse) -> str:
    """What an error says."""
    text = await answer.text()
    try:
        found = msgspec.json.decode(text)["error"]["message"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        found = text
    return str(found)[:ERROR_CHARS]


def _lacking(route: str) -> str:
    needed = NEEDED.get(route)
    return f"it was started without {needed}" if needed else "it lacks a route"
