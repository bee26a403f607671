"""The weight-transfer backend ``laminar`` of vLLM. One instance lives in each worker process of the server.

    start ─► update {"check": offer} ─► update {"load": version} ─► finish
                 │ refused: old weights whole      │ failed: weights spoilt until a complete load
                 └────────► check                  └────────► check

Invariants:
* No parameter is touched before bytes and layout of the version were checked, and all ranks agree that they are right.
* Ranks refuse and fail together: each digests its share of the blocks, and collectives decide for all of them.
* After a load that failed the parameters are not numbers, so nothing can be generated from a mixture of two versions,
  whoever resumes the server; `finish` is refused, so no version is stamped on them.
* A step does not raise; `problem` says what went wrong. When several workers raise, vLLM takes the first one's reply and
  leaves the others' in their queues, where the next calls find them (vllm#57846).
"""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator, get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from laminar.workers.engines.vllm_plugin import loading
from laminar.workers.engines.vllm_plugin.slot import Offer, Refused, Slot
from laminar.workers.relay.manifest import Manifest

logger = init_logger("vllm.laminar")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: the slot is a file, and every offer says which."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One step of an update."""

    check: dict[str, Any] | None = None
    """The fields of an `Offer`."""
    load: str = ""
    """The version that was checked."""


class LaminarWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """See the diagram of this module."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.problem = ""
        """What went wrong in the last step."""
        self._slot: Slot | None = None
        """Checked, not loaded yet."""
        self._loaded = False
        """Since the last `start`."""
        self._fitting: Manifest | None = None
        """The last layout that the model's loader took, so that the next version of the same model need not ask."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: the first step of an update forgets the one before."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One step. Overridden because vLLM's own synchronises an accelerator, which a CPU has not."""
        self.problem = ""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:  # noqa: BLE001  see the module
            self.problem = _text(error)
            logger.warning("weight update: %s", self.problem)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises Refused when a version does not fit, and whatever vLLM's loader raises."""
        if update_info.check is not None:
            self._check(update_info.check)
        else:
            self._load(update_info.load)

    def finish_weight_update(self) -> None:
        """vLLM stamps the version after this. Raises RuntimeError if nothing was loaded."""
        if not self._loaded:
            raise RuntimeError("no weights were loaded in this update: the server goes on with what it has")

    def shutdown(self) -> None:
        """Let go of the slot."""
        self._drop_slot()

    # ---- check

    def _check(self, fields: dict[str, Any]) -> None:
        self._drop_slot()
        self._loaded = False
        slot, problem, read = None, "", Counter[str]()
        group = get_world_group()
        try:
            slot = Slot(Offer.parse(fields))
            if slot.offer.manifest != self._fitting:
                read = loading.rehearse(self.model, slot.snapshot.tensors())
        except Exception as error:  # noqa: BLE001  the other ranks wait in the collective, whatever this one met
            problem = _text(error)
        if _any(group, problem):
            raise Refused(problem or "another rank of this server refused the weights: its log says why")
        assert slot is not None
        digests = _merged(group, slot.digests(group.rank_in_group, group.world_size))
        slot.check_digest(digests.numpy().tobytes())
        if slot.offer.manifest != self._fitting:
            loading.check_read(_summed(group, read, slot.offer.manifest), slot.snapshot.tensors())
            self._fitting = slot.offer.manifest
        self._slot = slot

    # ---- load

    def _load(self, version: str) -> None:
        slot = self._slot
        if slot is None or slot.offer.version != version:
            raise RuntimeError(f"{version!r} cannot be loaded: it is not what was checked last in this update")
        began, problem = time.monotonic(), ""
        try:
            loading.fill(self.model, self.model_config, slot.snapshot.tensors())
        except Exception as error:  # loaders raise anything, and the other ranks must hear of it
            logger.exception("loading %s failed half-way", version)
            problem = _text(error)
        self._drop_slot()
        if _any(get_world_group(), problem):
            loading.spoil(self.model)
            raise RuntimeError(f"{problem or 'another rank failed'}; the weights are spoilt until a complete load")
        self._loaded = True
        logger.info("loaded %s in %.3f s", version, time.monotonic() - began)

    def _drop_slot(self) -> None:
        if self._slot is not None:
            self._slot.close()
            self._slot = None


def _text(error: Exception) -> str:
    return str(error) or repr(error)


def _any(group: GroupCoordinator, problem: str) -> bool:
    """Whether any rank has a problem."""
    return bool(_merged(group, torch.tensor([bool(problem)], dtype=torch.uint8)).item())


def _merged(group: GroupCoordinator, values: torch.Tensor) -> torch.Tensor:
    """uint8 values of all ranks, where all ranks but one have zero."""
    if group.world_size > 1:
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group.cpu_group)
    return values


def _summed(group: GroupCoordinator, counts: Counter[str], manifest: Manifest) -> Counter[str]:
    """Counts by tensor, summed over all ranks."""
    names = [spec.name for spec in manifest.tensors]
    totals = torch.tensor([counts[name] for name in names], dtype=torch.int64)
    if group.world_size > 1:
        torch.distributed.all_reduce(totals, torch.distributed.ReduceOp.SUM, group.cpu_group)
    return Counter(dict(zip(names, totals.tolist(), strict=True)))
