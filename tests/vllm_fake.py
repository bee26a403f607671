"""A stand-in for a vLLM server where the real one cannot be made to misbehave. Run as a program it takes vLLM's flags.

`Behaviour` says what it does wrong. Tokens of a response count up from the length of the prompt; all log-probs are -1.
"""

import asyncio
import json
import os
import signal
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import msgspec
from aiohttp import web

LINE = 'vllm:{name}{{engine="0",model_name="m"}} {value}\n'


class Behaviour(msgspec.Struct):
    """What is wrong; the defaults are right."""

    version: str = "0.32.0"
    lacks: list[str] = []
    """Routes that answer 404."""
    generate_status: int = 200
    stamp: str = "default"
    """The weights that it says to have generated with."""
    lost_tokens: int = 0
    """Generated, by its spans, but not sent."""
    breaks_after: int = -1
    """Hang up after so many events."""
    error_event: str = ""
    logprob: float = -1.0
    pause_s: float = 0.0
    """Before each token."""
    max_model_len: int = 64
    sick: bool = False
    """/health says so, from the first request on."""


class FakeVllm:
    """`app` serves it."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.bodies: list[dict] = []
        self.aborted: set[str] = set()
        self.app = web.Application()
        routes = {
            "/health": self._health,
            "/version": self._answer({"version": behaviour.version}),
            "/weight_info": self._answer({"weight_version": "default"}),
            "/v1/models": self._answer({"data": [{"max_model_len": behaviour.max_model_len}]}),
            "/metrics/": self._metrics,
        }
        for route, handler in routes.items():
            if route not in behaviour.lacks:
                self.app.router.add_get(route, handler)
        self.app.router.add_post("/inference/v1/generate", self._generate)
        self.app.router.add_post("/inference/v1/abort_requests", self._abort)

    def _answer(self, value: object):
        async def answer(_request: web.Request) -> web.Response:
            return web.json_response(value)

        return answer

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self.behaviour.sick and len(self.bodies) > 1 else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        if "vllm:cache_config_info" in request.query.getall("name[]"):
            return web.Response(text='vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1.0\n')
        values = {"kv_cache_usage_perc": 0.5, "num_requests_running": 1.0, "num_requests_waiting": 0.0}
        lines = [LINE.format(name=name, value=value) for name, value in values.items()]
        return web.Response(text="".join([*lines, LINE.format(name="num_preemptions_total", value=3.0)]))

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted |= set((await request.json())["request_ids"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        behaviour, asked = self.behaviour, await request.json()
        self.bodies.append(asked)
        if behaviour.generate_status != 200:
            return web.json_response({"error": {"message": "no such thing"}}, status=behaviour.generate_status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_check = asked["request_id"] == "check"
        total, begin = asked["sampling_params"]["max_tokens"], len(asked["token_ids"])
        name, sent = f"generate-tokens-{asked['request_id']}", 0
        while True:
            await asyncio.sleep(0 if is_check else behaviour.pause_s)
            reason = "abort" if name in self.aborted else "length" if sent + 1 >= total else None
            tokens = [] if reason == "abort" else [begin + sent]
            sent += len(tokens)
            spans = [{"version": behaviour.stamp, "start": 0, "end": sent + behaviour.lost_tokens}]
            choice = {
                "token_ids": tokens,
                "logprobs": {"content": [{"logprob": behaviour.logprob}] * len(tokens)},
                "finish_reason": reason,
                "weight_versions": spans if reason else None,
            }
            event: dict = {"choices": [choice]}
            if not is_check and behaviour.error_event:
                event = {"error": {"message": behaviour.error_event}}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            if not is_check and sent == behaviour.breaks_after:
                assert request.transport is not None
                request.transport.abort()
            if reason:
                await response.write(b"data: [DONE]\n\n")
                return response


def main() -> None:
    """As a program: `LAMINAR_FAKE` holds a behaviour, `LAMINAR_FAKE_TAKEN` a file: while it exists, the port is taken."""
    print("fake vllm", *sys.argv[1:], flush=True)
    shared = SharedMemory(create=True, size=1 << 12) if "LAMINAR_FAKE_SHARES" in os.environ else None
    taken = os.environ.get("LAMINAR_FAKE_TAKEN")
    if taken and Path(taken).exists():
        Path(taken).unlink()
        sys.exit("OSError: [Errno 98] Address already in use")
    if "--deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--child" in sys.argv and os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
    if "--fails" in sys.argv:
        print("(EngineCore pid=12) ERROR 11-30 00:00:00 [core.py:1] ValueError: it does not fit")
        print("\n".join(f"line {number}" for number in range(20)), flush=True)
        sys.exit(2)
    fake = FakeVllm(msgspec.json.decode(os.environ.get("LAMINAR_FAKE", "{}"), type=Behaviour))
    web.run_app(fake.app, path=sys.argv[sys.argv.index("--uds") + 1], print=None, handle_signals=False)
    del shared


if __name__ == "__main__":
    main()
