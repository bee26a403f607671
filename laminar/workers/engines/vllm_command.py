"""How the vLLM server of a replica is started."""

import os
import subprocess
from pathlib import Path

from laminar import roofline
from laminar.config import Config
from laminar.workers.engines.vllm_weights import SERVER_ENVIRONMENT, SERVER_FLAGS

STREAM_INTERVAL = 8  # tokens per event: an event costs server and worker about the same, whatever is in it
NVIDIA_SMI_S = 20.0  # the driver may have to be loaded first
CPU_KV_GIB = "1"  # for a model that runs on a CPU at all


def command(
    config: Config, python: str, *, gpus: int, max_concurrent: int, logprobs_mode: str, extra: list[str]
) -> list[str]:
    """`gpus` 0 = CPU, else one tensor-parallel part on each. `extra`: the user's flags, which come last."""
    flags = [
        "--model", config.model.path, "--dtype", dtype(config, gpus), "--seed", str(config.run.seed),
        "--tensor-parallel-size", str(max(1, gpus)), "--max-num-seqs", str(max_concurrent),
        "--logprobs-mode", logprobs_mode, "--generation-config", "vllm", "--enable-prefix-caching", "--enable-scale-out",
        "--stream-interval", str(STREAM_INTERVAL), "--disable-uvicorn-access-log", *SERVER_FLAGS,
    ]  # fmt: skip
    if config.model.context_tokens_max:
        flags += ["--max-model-len", str(config.model.context_tokens_max)]
    if not gpus:
        # torch's CPU generator cannot be set back, which vLLM does for a seeded request whose prompt is cut in pieces
        flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *flags, *extra]


def environment(gpus: int) -> dict[str, str]:
    """The worker's own, by which the launcher knows what belongs to the run, and what vLLM needs. What the user set stays."""
    # vLLM's processes write their names over their environment, by which the launcher knows them, unless SPT_NOENV is set
    wanted = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "SPT_NOENV": "1"}
    if not gpus:
        # Each server would bind its threads to the same first core. The first request would compile for 20 s. A process of its
        # own for the one worker would import vLLM, 10 s, a third time.
        wanted |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": CPU_KV_GIB,
            "TORCH_COMPILE_DISABLE": "1",
        }
    return {**wanted, **os.environ, **SERVER_ENVIRONMENT}


def dtype(config: Config, gpus: int) -> str:
    """Of the weights, as the trainer publishes them."""
    default = "bfloat16" if gpus else "float32"
    return default if config.relay.dtype == "auto" else config.relay.dtype


def num_requests_memory_bound(config: Config, gpus: int) -> int:
    """B by the roofline of the GPU; 0 on a CPU, an unknown GPU, or with weights that are not 16 bits wide."""
    if not gpus or dtype(config, gpus) == "float32":
        return 0
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    hardware = roofline.known(names.partition("\n")[0])
    return roofline.requests_memory_bound(hardware) if hardware else 0


def log_path(name: str) -> Path:
    """Beside the worker's own log, else in the working directory."""
    own = os.environ.get("LAMINAR_LOG")
    return Path(own).with_suffix(".vllm.log") if own else Path(f"{name}.vllm.log")
