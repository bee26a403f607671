"""Laminar inside vLLM's worker processes: a weight-transfer backend that reads a relay's slot.

vLLM finds `register` through the entry point group ``vllm.general_plugins`` and calls it in each of its processes; the
backend is chosen with ``--weight-transfer-config '{"backend": "laminar"}'``. This package and what it imports need
nothing but vLLM's own environment, msgspec and xxhash. The other half of the protocol is `engines/vllm_weights.py`.
"""

BACKEND = "laminar"


def register() -> None:
    """Make the backend known to vLLM. Called several times in one process, as vLLM's plugins are."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # it has no public question, and refuses a second entry
        WeightTransferEngineFactory.register_engine(BACKEND, f"{__name__}.transfer", "LaminarWeightTransfer")
