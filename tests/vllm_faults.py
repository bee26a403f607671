"""A fault inside vLLM's workers: reading a slot breaks off half-way while the file $LAMINAR_TEST_FAULT exists."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TENSORS_READ = 7  # into the first layer, past the embedding


def register() -> None:
    """A plugin of vLLM, as `running_vllm(plugins=…)` installs it."""
    from laminar.workers.relay.manifest import Snapshot

    whole = Snapshot.tensors

    def tensors(self: Snapshot) -> Iterator[Any]:
        for index, tensor in enumerate(whole(self)):
            if index == TENSORS_READ and Path(os.environ["LAMINAR_TEST_FAULT"]).exists():
                raise OSError("the slot broke off, as the test wanted")
            yield tensor

    Snapshot.tensors = tensors
