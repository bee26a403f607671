"""The engine that a rollout worker was told to run."""

import msgspec

from laminar.config import Config
from laminar.errors import StartError
from laminar.workers.engines.base import Engine

ENGINES = ("embedded", "vllm")
STALL_FACTOR = (
    1.5  # of rollout.progress_timeout_s: after the controller has suspected the replica, before it gives it up
)


class EngineChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine, and what the hosts file says of it."""

    name: str = "embedded"
    max_concurrent: int = 0
    """0 = `rollout.max_concurrent`."""
    gpus: int = 0
    """vllm: GPUs of the replica, one tensor-parallel part on each; 0 = CPU."""
    vllm_python: str = ""
    """Interpreter of the environment with vLLM."""
    vllm_url: str = ""
    """A server that runs already, instead of one of its own."""
    vllm_flags: tuple[str, ...] = ()


def make_engine(choice: EngineChoice, config: Config, worker: str) -> Engine:
    """The engine, not started. Raises StartError for a limit that it does not take."""
    if choice.name not in ENGINES:
        raise StartError(f"no engine {choice.name!r}; there is: {', '.join(ENGINES)}")
    max_concurrent = choice.max_concurrent or config.rollout.max_concurrent
    return (_vllm if choice.name == "vllm" else _embedded)(choice, config, max_concurrent, worker)


def _embedded(_choice: EngineChoice, config: Config, max_concurrent: int, _worker: str) -> Engine:
    import torch

    from laminar.workers.engines.embedded import EmbeddedEngine

    default = "bfloat16" if torch.cuda.is_available() else "float32"
    try:
        return EmbeddedEngine(
            config.model.path,
            num_requests_max=max_concurrent,
            context_tokens_max=config.model.context_tokens_max,
            dtype=default if config.relay.dtype == "auto" else config.relay.dtype,
        )
    except ValueError as error:
        raise StartError(f"the embedded engine cannot start: {error}") from error


def _vllm(choice: EngineChoice, config: Config, max_concurrent: int, worker: str) -> Engine:
    from laminar.workers.engines import vllm_command
    from laminar.workers.engines.vllm import VllmEngine, logprobs_mode
    from laminar.workers.engines.vllm_http import VllmServer
    from laminar.workers.engines.vllm_server import AttachedServer, OwnServer

    mode = logprobs_mode(config.rollout.temperature)
    server: VllmServer
    if choice.vllm_url:
        server = AttachedServer(choice.vllm_url)
    elif not choice.vllm_python:
        raise StartError(
            "the vllm engine needs --vllm-python (of an environment with vLLM) or --vllm-url (of a server)"
        )
    else:
        command = vllm_command.command(
            config,
            choice.vllm_python,
            gpus=choice.gpus,
            max_concurrent=max_concurrent,
            logprobs_mode=mode,
            extra=list(choice.vllm_flags),
        )
        environment, log_path = vllm_command.environment(choice.gpus), vllm_command.log_path(worker)
        server = OwnServer(command, environment, log_path, config.controller.start_timeout_s)
    return VllmEngine(
        server,
        logprobs_mode=mode,
        num_requests_max=max_concurrent,
        stall_s=STALL_FACTOR * config.rollout.progress_timeout_s,
        num_requests_memory_bound=vllm_command.num_requests_memory_bound(config, choice.gpus),
    )
