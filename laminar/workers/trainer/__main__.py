"""One trainer rank: `torchrun --nproc-per-node=N -m laminar.workers.trainer --controller URL --name trainer-0 [--resume PATH]`.

Every rank dials in as `<name>/<rank>` and gets the same ordered commands; rank 0 answers for all. The run token comes from the
environment variable LAMINAR_TOKEN. Exit codes: 0 stopped, 1 failed, 3 no controller for `orphan_timeout_s`.
"""

import argparse
import os
import sys
import traceback
from pathlib import Path

import msgspec
from torch.distributed import DistError

from laminar import descriptors, wire
from laminar.config import Config
from laminar.errors import LaminarError
from laminar.workers.link import LinkRefused, Orphaned, ThreadLink
from laminar.workers.relay import paths
from laminar.workers.relay.client import RelayClient
from laminar.workers.trainer.checkpoint import Restored
from laminar.workers.trainer.collective import local_device, process_group, use_own_interface
from laminar.workers.trainer.saver import Saved
from laminar.workers.trainer.trainer import Trainer

CONNECT_TIMEOUT_S = 120.0  # a controller that launched us answers at once; a restarting one within its orphan timeout
RECEIVE_TIMEOUT_S = 60.0  # only bounds one wait; the link itself notices a lost controller
RELAY_TIMEOUT_S = 8.0  # a publication is ordered when the relay serves; one that does not answer for so long is dead
SAVE_TIMEOUT_S = 5.0  # a stop waits for checkpoints before it is said; what is written after that, nobody waits for
EXIT_FAILED, EXIT_ORPHANED = 1, 3


def main(arguments: list[str] | None = None) -> int:
    """Run one rank until it is stopped; the exit code."""
    options = _parse(arguments)
    descriptors.raise_limit()
    rank = int(os.environ.get("RANK", "0"))
    link = ThreadLink(options.controller, worker=f"{options.name}/{rank}", role="trainer")
    try:
        welcome = link.connect(CONNECT_TIMEOUT_S)
        _work(link, welcome, options.resume)
    except Orphaned as error:
        return _give_up(link, str(error), EXIT_ORPHANED)
    except (LinkRefused, TimeoutError) as error:
        return _give_up(link, f"{options.name}/{rank} could not join: {error}", EXIT_FAILED)
    except (LaminarError, OSError, RuntimeError, ValueError, ArithmeticError) as error:
        reason = f"{options.name}/{rank}: {_one_line(error)}"
        if not _is_of_a_peer(error):
            link.send(wire.WorkerFailed(reason=reason, detail=traceback.format_exc()))
        return _give_up(link, reason, EXIT_FAILED)
    link.close()
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m laminar.workers.trainer", description="One Laminar trainer rank.")
    parser.add_argument("--controller", required=True, help="URL of the controller")
    parser.add_argument("--name", required=True, help="worker name, for example trainer-0; ranks add /<rank>")
    parser.add_argument("--resume", type=Path, help="checkpoint directory to go on from")
    return parser.parse_args(arguments)


def _give_up(link: ThreadLink, reason: str, code: int) -> int:
    print(reason, file=sys.stderr, flush=True)
    link.close(goodbye=False)
    return code


def _is_of_a_peer(error: BaseException) -> bool:
    """Another rank broke a collective. The controller is not told: the cause is that rank's to tell, or torchrun's."""
    return isinstance(error, DistError) or "gloo" in str(error)


def _one_line(error: BaseException) -> str:
    if _is_of_a_peer(error):
        return "another rank went away in a collective; the rank that failed first names the cause"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _work(link: ThreadLink, welcome: wire.Welcome, resume: Path | None) -> None:
    """Build the trainer, report, and obey until Stop."""
    config = msgspec.msgpack.decode(welcome.config, type=Config)
    device = local_device()
    use_own_interface(os.environ.get(wire.ADDRESS_VARIABLE, ""), int(os.environ.get("GROUP_WORLD_SIZE", "1")))
    with process_group(device):
        trainer = Trainer(config, device=device)
        restored = trainer.restore(resume) if resume else Restored(0, b"", [])
        commands = Commands(trainer, link, RelayClient(paths.shm_directory(welcome.run_id), RELAY_TIMEOUT_S))
        link.send(
            wire.TrainerReady(
                rank=trainer.rank,
                world_size=trainer.world_size,
                step=trainer.step_done,
                num_parameters=trainer.num_parameters,
                data_state=restored.data_state,
                damaged=restored.damaged,
            )
        )
        while commands.obey(link.receive(RECEIVE_TIMEOUT_S)):
            pass
        trainer.await_save(SAVE_TIMEOUT_S)


class Commands:
    """The controller's commands, one after another; rank 0 answers each with exactly one message."""

    def __init__(self, trainer: Trainer, link: ThreadLink, relay: RelayClient) -> None:
        self._trainer = trainer
        self._link = link
        self._relay = relay

    def obey(self, message: wire.Message | None) -> bool:
        """Carry out one command (None = nothing came yet); False after Stop. Errors of a step are reported and raised."""
        match message:
            case wire.StartStep():
                self._step(message)
            case wire.Publish():
                self._publish(message)
            case wire.SaveCheckpoint():
                self._save(message)
            case wire.Stop():
                return False
            case None:
                pass
            case _:
                raise LaminarError(f"a trainer does not understand {type(message).__name__}")
        return True

    def _answer(self, message: wire.Message) -> None:
        if self._trainer.rank == 0:
            self._link.send(message)

    def _step(self, command: wire.StartStep) -> None:
        try:
            metrics = self._trainer.step(command.step, command.rows, self._link.fetch_tokens)
        except (LaminarError, OSError, RuntimeError, ValueError, ArithmeticError) as error:
            reason = f"rank {self._trainer.rank}: {_one_line(error)}"
            if not _is_of_a_peer(error):
                self._link.send(wire.StepFailed(step=command.step, attempt=command.attempt, reason=reason))
            raise
        self._answer(wire.StepDone(step=command.step, attempt=command.attempt, metrics=metrics))

    def _publish(self, command: wire.Publish) -> None:
        done = self._trainer.publish(command, self._relay)
        if done.failure is not None:
            failed = wire.PublishFailed(version=command.version, reason=done.failure, publication=command.publication)
            self._answer(failed)
            return
        written = wire.ShardsWritten(
            version=command.version,
            publication=command.publication,
            stall_s=done.stall_s,
            cast_s=done.cast_s,
            device_copy_s=done.device_copy_s,
            host_copy_s=done.host_copy_s,
        )
        self._answer(written)

    def _save(self, command: wire.SaveCheckpoint) -> None:
        """Answered by the thread that writes, while further commands are carried out."""

        def ended(saved: Saved) -> None:
            if saved.failure is not None:
                self._answer(wire.CheckpointFailed(step=command.step, reason=saved.failure))
                return
            answer = wire.CheckpointSaved(
                step=command.step, path=command.path, seconds=saved.seconds, stall_s=saved.stall_s
            )
            self._answer(answer)

        self._trainer.begin_save(Path(command.path), step=command.step, data_state=command.data_state, ended=ended)


if __name__ == "__main__":
    sys.exit(main())
