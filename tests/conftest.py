"""What all tests share."""

import sys
from collections.abc import Iterator

import pytest

WHOLE_MACHINE = ("test_e2e_", "test_relay_", "test_application", "test_launch")
"""Tests of processes and of /dev/shm as a whole: one after another, also when the others run beside them."""


@pytest.fixture(autouse=True)
def import_path() -> Iterator[None]:
    """User code by reference appends its directory to sys.path; the next test must not find it there."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest first, so that two workers end together."""
    for item in items:
        if item.path.name.startswith(WHOLE_MACHINE):
            item.add_marker(pytest.mark.xdist_group("whole machine"))
    items.sort(key=lambda item: not item.path.name.startswith(WHOLE_MACHINE))
