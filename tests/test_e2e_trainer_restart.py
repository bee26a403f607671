"""A real run whose trainer is hurt in many ways: it goes on from its newest good checkpoint each time, and the rollouts never stop.

    rank 0 killed while a checkpoint is written ─► both ranks killed in a publication
        ─► a rank that stands still, and the newest checkpoint damaged meanwhile

Each batch is trained whole and in its order, again only after a restore, and no trajectory is in two batches.
"""

import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from e2e import SMALL, Run, hosts_file, ledger_is_closed
from e2e_replay import events_of

from laminar import configfile
from laminar.controller.coresettings import settings_of
from laminar.core import actions, events
from laminar.core.engine import Core
from laminar.tasks import datasets

pytestmark = pytest.mark.timeout(900)

EVERY = 4
OVERRIDES = (
    *SMALL,
    "run.steps=20000",
    "rollout.max_concurrent=8",  # the trainer is faster, and
    "buffer.max_groups=20000",  # rollouts are not held back while it is away
    f"trainer.checkpoint_every={EVERY}",
    "trainer.keep_last=3",
    "trainer.restarts=2",
    "controller.heartbeat_s=1",
    "controller.heartbeat_timeout_s=6",
)
LATER_S = 240.0  # a trainer starts again beside rollouts that do not spare the machine

HOLD = """
import os
import time
from pathlib import Path

WORD = Path({word!r})
sync = os.fsync


def wait_then_sync(descriptor):
    while WORD.exists():
        Path(f"{{WORD}}-reached").touch()
        time.sleep(0.02)
    sync(descriptor)


if os.environ.get("LAMINAR_PROCESS") == "trainer-0" and os.environ.get("RANK") == "0":
    os.fsync = wait_then_sync
"""
"""A `sitecustomize` of the run's processes: nothing that the trainer's rank 0 writes reaches the disk while the file exists."""


def ranks(run: Run) -> list[psutil.Process]:
    """Of the trainer, by rank."""
    found = [p for p in run.marked() if "laminar.workers.trainer" in p.cmdline() and "RANK" in p.environ()]
    return sorted(found, key=lambda process: int(process.environ()["RANK"]))


def steps_done(run: Run) -> list[events.StepFinished]:
    return [event for event in events_of(run) if isinstance(event, events.StepFinished)]


def saves(run: Run) -> list[int]:
    """Steps of checkpoints that were told to be complete."""
    return [event.step for event in events_of(run) if isinstance(event, events.CheckpointSaved)]


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def num_starts(run: Run) -> int:
    return sum(line.startswith("trainer-0 is started again") for line in run.lines)


def goes_on(run: Run, starts: int) -> None:
    """The trainer was started again so many times, and has saved something since."""
    run.until(lambda: num_starts(run) == starts, LATER_S)
    restored = run.until(lambda: [s for _, s in restores(run)][starts:], LATER_S)[0]
    run.until(lambda: saves(run)[-1] > restored, LATER_S)


def restores(run: Run) -> list[tuple[int, int]]:
    """(seq, step) of each launch of the trainer that came up."""
    ready = [e for e in events_of(run) if isinstance(e, events.TrainerRankReady)]
    last = {event.incarnation: event for event in ready if event.rank == 1}
    return [(event.seq, event.step) for event in last.values()]


def kill_in_a_checkpoint(run: Run, word: Path) -> None:
    run.until(run.checkpoints, LATER_S)
    word.touch()
    run.until(Path(f"{word}-reached").exists)
    done, complete = steps_done(run)[-1].step, run.checkpoints()
    run.until(lambda: steps_done(run)[-1].step >= done + EVERY + 2)  # training goes on, beyond where the next is due
    assert run.checkpoints() == complete, "none is complete before it is on disk"
    ranks(run)[0].kill()
    run.until(lambda: num_starts(run) == 1, LATER_S)
    word.unlink()
    goes_on(run, 1)
    assert restores(run)[1][1] == complete[-1]
    assert not list((run.path / "checkpoints").glob("*.writing-*/meta.json")), "what was half written is gone"


def kill_in_a_publication(run: Run) -> None:
    relay = run.worker("laminar.workers.relay")
    assert relay is not None
    relay.suspend()
    stopped_at = time.time()
    run.until(lambda: steps_done(run)[-1].at > stopped_at)  # its weights cannot be handed over
    cut = steps_done(run)[-1].step
    for rank in ranks(run):
        rank.kill()
    relay.resume()
    goes_on(run, 2)
    lost = run.query("SELECT count(*) FROM versions WHERE step = ? AND branch = 1", cut)
    assert lost == [(0,)], "a version that was handed over in part is never readable"


def stop_a_rank_and_damage_the_newest_checkpoint(run: Run) -> tuple[int, int]:
    """(its step, that of the one before). One that is complete, but not told, because the rank stands still, is damaged, too."""
    run.until(lambda: len(run.checkpoints()) > 1)
    ranks(run)[1].suspend()
    run.until(lambda: steps_done(run)[-1].at < time.time() - 1.0)
    newest = saves(run)[-1]
    for step in run.checkpoints()[run.checkpoints().index(newest) :]:
        flip_a_bit(run.path / "checkpoints" / f"step-{step}" / "state" / "__1_0.distcp")
    before = run.checkpoints()[run.checkpoints().index(newest) - 1]
    run.until_said(r"^alarm: trainer-lost: .*trainer-0/\d: its channel broke and did not come back", LATER_S)
    run.until_said(
        rf"^alarm: checkpoint-damaged: .*step-{newest}: rank \d: state/__1_0\.distcp has other bytes than were written; "
        rf"the trainer goes on from step {before}; what steps {before + 1} to {newest} had trained is lost: ",
        LATER_S,
    )
    goes_on(run, 3)
    assert (run.path / "checkpoints" / f"step-{newest}.damaged").is_dir()
    return newest, before


def test_a_trainer_that_is_hurt_in_many_ways_trains_on_from_its_newest_good_checkpoint(tmp_path: Path) -> None:
    word, hook = tmp_path / "hold", tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOLD.format(word=str(word)))
    hosts = hosts_file(tmp_path, ranks=2)
    with Run.start(tmp_path, hosts, *OVERRIDES, python_path=(str(hook),)) as run:
        kill_in_a_checkpoint(run, word)
        kill_in_a_publication(run)
        newest, before = stop_a_rank_and_damage_the_newest_checkpoint(run)
        run.signal(signal.SIGINT)
        assert run.wait() == 0, run.output
    assert ledger_is_closed(run.output), run.output
    assert run.num_dropped().keys() <= {"stopped", "checkpoint_lost"}
    assert run.num_dropped()["checkpoint_lost"] == 16 * (newest - before)
    _check(run)
    _check_output(run)


def _check(run: Run) -> None:
    """Each batch was trained whole, in its order, if again then after a restore; rollouts finished something in each absence."""
    config = configfile.load(run.path / "config.toml", [])
    core = Core(settings_of(config, datasets.load(config.task)))
    starts: list[actions.StartTrainStep] = []
    finished: dict[int, int] = {}  # by the branch that an absence of the trainer ended
    for event in events_of(run):
        starts += [action for action in core.handle(event) if isinstance(action, actions.StartTrainStep)]
        trainer = core.state.trainer
        if isinstance(event, events.ReplicaReported) and not trainer.ready and trainer.branch >= 0:
            finished[trainer.branch] = finished.get(trainer.branch, 0) + len(event.finished)
    assert [branch for branch, num in finished.items() if num] == [0, 1, 2]
    batches = {tuple(row.trajectory for row in action.rows) for action in starts}
    trajectories = [trajectory for batch in batches for trajectory in batch]
    assert len(set(trajectories)) == len(trajectories)
    assert len({(action.step, action.attempt) for action in starts}) == len(starts)
    for seq, step in restores(run):
        assert next(action.step for action in starts if action.cause >= seq) == step + 1
    kept = "FROM trajectories WHERE trained_at IS NOT NULL AND dropped IS NULL"
    rows = run.query(f"SELECT step, count(*), count(DISTINCT id) {kept} GROUP BY step")
    assert rows == [(step, 16, 16) for step in range(1, core.state.trainer.step + 1)]


def _check_output(run: Run) -> None:
    """What people see, and that no replica was lost."""
    assert re.search(r"@v\d+\.b3", run.output), "replicas pulled weights of the last branch"
    assert run.query("SELECT count(*) FROM metrics WHERE name = 'perf/checkpoint_stall_s' AND value > 0")[0][0] > 0
    lost = [e for e in events_of(run) if isinstance(e, events.WorkerLost) and e.worker.startswith("rollout")]
    assert {event.reason for event in lost} <= {"said goodbye"}
