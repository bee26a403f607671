"""What all tests share."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def import_path() -> Iterator[None]:
    """User code by reference appends its directory to sys.path; the next test must not find it there."""
    before = list(sys.path)
    yield
    sys.path[:] = before
