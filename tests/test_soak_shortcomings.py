"""What scripts/soak.py asks of a report besides that it is clean."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from soak import FULL_MINUTES, shortcomings

FAULTS = [{"kind": kind, "skipped": ""} for kind in "abcdefgh" for _ in range(5)]
ENOUGH = {"num_faults": 40, "num_kinds": 8, "reward": (0.5, 0.9), "faults": FAULTS}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"num_faults": 39}, ["39 faults, not 40"]),
        ({"num_kinds": 7}, ["7 kinds, not 8"]),
        ({"reward": (0.9, 0.5)}, ["the reward went from 0.900 to 0.500"]),
        ({"faults": [*FAULTS, {"kind": "a", "skipped": "busy"}]}, []),
        ({"faults": [*FAULTS, {"kind": "i", "skipped": "no room"}]}, ["no i struck: no room"]),
    ],
)
def test_a_report_lacks(changes: dict[str, Any], found: list[str]) -> None:
    assert shortcomings(ENOUGH | changes, FULL_MINUTES) == found
