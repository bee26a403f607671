"""What vLLM's workers answer about weights: mixed into its worker class by ``--worker-extension-cls``."""

from typing import Any

from laminar.workers.engines.vllm_plugin import BACKEND
from laminar.workers.engines.vllm_plugin.transfer import LaminarWeightTransfer


class WeightReports:
    """Methods that ``/collective_rpc`` can call in every worker process."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def laminar_weights(self) -> dict[str, Any]:
        """``problem``: of the last step of a weight update, empty if it went well. ``open``: an update was begun."""
        if not isinstance(self.weight_transfer_engine, LaminarWeightTransfer):
            return {"problem": f"this server's weight-transfer backend is not {BACKEND!r}", "open": False}
        return {"problem": self.weight_transfer_engine.problem, "open": self._weight_update_active}
