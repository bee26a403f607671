"""Flags of vLLM in a hosts file: ``vllm.max-num-batched-tokens=8192`` is ``--max-num-batched-tokens 8192``.

``vllm.enable-lora=true`` is ``--enable-lora`` and ``=false`` is ``--no-enable-lora``. A value has no spaces, as everything in a
hosts file; JSON can be written without them.
"""

import re

PREFIX = "vllm."
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

SET_ELSEWHERE = {
    "model": "model.path in the configuration",
    "max-model-len": "model.context_tokens_max in the configuration",
    "dtype": "relay.dtype in the configuration",
    "seed": "run.seed in the configuration",
    "max-num-seqs": "max_concurrent=N",
    "tensor-parallel-size": "tp=N",
    "uds": "nothing: the server listens on a socket of its worker",
    "host": "nothing: the server listens on a socket of its worker",
    "port": "nothing: the server listens on a socket of its worker",
    "logprobs-mode": "nothing: it follows from rollout.temperature",
    "generation-config": "nothing: sampling is configured under [rollout]",
    "override-generation-config": "nothing: sampling is configured under [rollout]",
    "enable-scale-out": "nothing: it is always on",
    "enable-prefix-caching": "nothing: it is always on",
    "weight-transfer-config": "nothing: weights come from the relay",
    "worker-extension-cls": "nothing: the workers' reports of weights are mixed in with it",
    "disable-log-stats": "nothing: the scheduler needs the metrics",
    "api-key": "nothing: only the worker can reach the server",
    "data-parallel-size": "replicas=N: each replica refreshes its weights by itself",
    "pipeline-parallel-size": "tp=N: weights are loaded into tensor-parallel parts",
    "config": "vllm.FLAG=VALUE for each of its lines",
}
"""Flags that Laminar sets or cannot work with, and what to use instead."""


def why_refused(key: str) -> str:
    """What is wrong with a key ``vllm.FLAG``; empty if nothing is known to be."""
    name = _name(key)
    if not _NAME.fullmatch(name):
        return "expected vllm.FLAG=VALUE with a flag of vLLM without its dashes, like vllm.block-size=32"
    instead = SET_ELSEWHERE.get(name.removeprefix("no-"))
    return f"--{name} cannot be set here; use {instead}" if instead else ""


def command_line(options: dict[str, str]) -> list[str]:
    """The flags among a host's options, in their order, as vLLM takes them."""
    flags: list[str] = []
    for key, value in options.items():
        if not key.startswith(PREFIX):
            continue
        name = _name(key)
        if value == "true":
            flags.append(f"--{name}")
        elif value == "false":
            flags.append(f"--no-{name}")
        else:
            flags += [f"--{name}", value]
    return flags


def _name(key: str) -> str:
    return key.removeprefix(PREFIX).replace("_", "-")
