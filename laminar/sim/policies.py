"""The scheduling policies that are compared, by name: a refresh policy and the core settings that differ from the scenario's.

docs/policies/comparison.md has the results, and which one is recommended.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from laminar.core.settings import RefreshPolicy


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a scenario is to run."""

    refresh: RefreshPolicy
    core: Mapping[str, Any] = field(default_factory=dict)
    """Core settings (`laminar.core.settings`) in place of the scenario's."""
    ready_batches: float = 0.0
    """Complete groups, in global batches, at which new groups are held back; 0 = not looked at."""

    def settings(self, batch_groups: int) -> tuple[tuple[str, Any], ...]:
        """The core settings that differ."""
        ready = {"ready_groups_max": int(self.ready_batches * batch_groups)} if self.ready_batches else {}
        return tuple((self.core | ready).items())  # type: ignore[operator]


PARTS: Mapping[str, Any] = {"repack_policy": "parts"}
POLICIES: Mapping[str, Policy] = {
    "batch": Policy(refresh="batch"),
    "batch, no repack": Policy(refresh="batch", core={"repack_interval_s": 0.0}),
    "batch, parts": Policy(refresh="batch", core=PARTS),
    "continuous": Policy(refresh="continuous"),
    "continuous, half": Policy(refresh="continuous", core={"draining_share": 0.5}),
    "continuous, parts": Policy(refresh="continuous", core=PARTS),
    "continuous, parts, ready": Policy(refresh="continuous", core=PARTS, ready_batches=1.0),
    "continuous, half, parts, ready": Policy(
        refresh="continuous", core={"draining_share": 0.5, **PARTS}, ready_batches=1.0
    ),
    "rolling 0.5, parts, ready": Policy(refresh="rolling", core={"staleness_budget": 0.5, **PARTS}, ready_batches=1.0),
    "rolling 1.0, parts, ready": Policy(refresh="rolling", core={"staleness_budget": 1.0, **PARTS}, ready_batches=1.0),
    "batch, wait within 2": Policy(refresh="batch", core={"max_staleness": 2, "on_stale": "wait"}),
    "continuous, parts, wait within 2": Policy(
        refresh="continuous", core={"max_staleness": 2, "on_stale": "wait", **PARTS}
    ),
}
RECOMMENDED = "continuous, parts, ready"
