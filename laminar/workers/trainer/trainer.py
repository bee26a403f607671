"""The trainer of one rank, without any channel: built from a configuration, driven by four calls.

`step`, `publish`, `begin_save` and `restore` are collective: all ranks of the process group call them in the same order with the
same arguments. `laminar.workers.trainer.__main__` drives them from the controller's commands; tests and benchmarks do so directly.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from laminar import wire
from laminar.config import Config
from laminar.ids import Version, derive_seed
from laminar.workers.canary import Canary
from laminar.workers.relay.client import RelayClient
from laminar.workers.trainer import checkpoint
from laminar.workers.trainer.batch import Fetch
from laminar.workers.trainer.checkpoint import Restored, Source
from laminar.workers.trainer.model import (
    LAYER_PARAMETERS_MIN,
    Policy,
    compute_dtype,
    load_model,
    local_parameters,
    shard_model,
)
from laminar.workers.trainer.optimizer import Optimizer
from laminar.workers.trainer.publish import Publication, Publisher, plan_manifest, published_dtype
from laminar.workers.trainer.saver import Saved, Saver
from laminar.workers.trainer.step import StepRunner


class Trainer:
    """Model, optimizer and step counter of this rank. Needs an initialised process group (`collective.process_group`).

    Raises StartError for a model that cannot be loaded, ConfigError for one that cannot be packed. `layer_parameters_min` is
    the size from which a layer is an FSDP unit of its own.
    """

    def __init__(
        self, config: Config, *, device: torch.device, layer_parameters_min: int = LAYER_PARAMETERS_MIN
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.step_done = 0
        """The last step applied (or restored)."""
        self.version: Version | None = None
        """Name of the current weights; None once a step has changed them, until they are published."""
        self._with_canary = config.rollout.canary_tolerance != 0
        torch.manual_seed(derive_seed(config.run.seed, self.rank))
        dtype = compute_dtype(config.trainer.precision, device)
        self.model = load_model(config.model.path, activation_checkpointing=config.trainer.activation_checkpointing)
        shard_model(
            self.model,
            world_size=self.world_size,
            device=device,
            dtype=dtype,
            layer_parameters_min=layer_parameters_min,
        )
        self.policy = Policy(self.model, temperature=config.rollout.temperature, device=device)
        if config.trainer.packing == "group":
            self.policy.check_packing(dtype, 'trainer.packing = "none"')
        if config.task.agent and config.task.on_rewrite == "split":
            self.policy.check_packing(dtype, 'task.on_rewrite = "refuse"')
        self.parameters = local_parameters(self.model)
        self.optimizer = Optimizer(self.parameters, config.trainer)
        manifest = plan_manifest(self.parameters, published_dtype(config.relay.dtype, device))
        self._publisher = Publisher(self.parameters, manifest)
        shapes = {part.name: part.parameter.shape for part in self.parameters}
        self._saver = Saver(Source(self.model, Path(config.model.path), shapes), self.parameters, self.optimizer)
        self._runner = StepRunner(
            config, self.policy, self.optimizer, rank=self.rank, world_size=self.world_size, device=device
        )

    @property
    def num_parameters(self) -> int:
        """Of the whole model, each storage once."""
        return sum(part.parameter.numel() for part in self.parameters)

    def step(self, number: int, rows: Sequence[wire.BatchRow], fetch: Fetch) -> dict[str, float]:
        """Train step `number` on `rows`; its metrics. See `StepRunner.run` for errors."""
        metrics = self._runner.run(rows, fetch, self.version)
        self.step_done, self.version = number, None
        return metrics

    def publish(self, order: wire.Publish, client: RelayClient) -> Publication:
        """Write the current weights to the relay of this host, as the version that is ordered."""
        publication = self._publisher.publish(order, client, self._canary)
        self.version = order.version
        return publication

    def _canary(self) -> Canary | None:
        return self.policy.canary() if self._with_canary else None

    def begin_save(self, path: Path, *, step: int, data_state: bytes, ended: Callable[[Saved], None]) -> None:
        """Have a checkpoint written while training goes on. See `Saver.begin`."""
        self._saver.begin(path, step=step, data_state=data_state, ended=ended)

    def await_save(self, timeout_s: float | None = None) -> None:
        """Until no checkpoint is being written, or the time is over."""
        self._saver.wait(timeout_s)

    def restore(self, path: Path) -> Restored:
        """Go on from a checkpoint, or the newest undamaged one before it. Sets `step_done`. Raises StartError."""
        restored = checkpoint.restore(path, parameters=self.parameters, optimizer=self.optimizer)
        self.step_done, self.version = restored.step, None
        return restored
