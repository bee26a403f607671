"""The few lines of vLLM's `/metrics` that the scheduler wants. Pure: no I/O."""

import re

import msgspec

NAMES = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", "num_preemptions_total")
QUERY = "/metrics/?" + "&".join(f"name[]=vllm:{name}" for name in NAMES)
"""Only these are rendered: all of them are 60 kB, which would cost the server several ms per poll."""
CACHE_QUERY = "/metrics/?name[]=vllm:cache_config_info"
_LINE = re.compile(r"^vllm:(\w+)\{[^}]*\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of itself, summed over its engines."""

    kv_share: float
    """0 to 1 of the KV blocks are in use."""
    num_running: int
    num_waiting: int
    num_preemptions: int
    """Since the server started."""


def parse_load(text: str) -> Load:
    """From the answer to `QUERY`. Raises ValueError when a line is missing."""
    values: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        values.setdefault(name, []).append(float(value))
    missing = [name for name in NAMES if name not in values]
    if missing:
        raise ValueError(f"vLLM's /metrics lacks {', '.join(missing)}: was it started with --disable-log-stats?")
    shares = values["kv_cache_usage_perc"]
    return Load(
        kv_share=sum(shares) / len(shares),
        num_running=int(sum(values["num_requests_running"])),
        num_waiting=int(sum(values["num_requests_waiting"])),
        num_preemptions=int(sum(values["num_preemptions_total"])),
    )


def parse_kv_tokens(text: str) -> int:
    """KV capacity in tokens, from the answer to `CACHE_QUERY`. Raises ValueError when it is not there."""
    total = 0
    for line in text.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            labels = dict(_LABEL.findall(line))
            try:
                total += int(labels["num_gpu_blocks"]) * int(labels["block_size"])
            except (KeyError, ValueError):
                continue
    if not total:
        raise ValueError("vLLM's /metrics does not say how many KV blocks there are")
    return total
