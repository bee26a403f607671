"""Whole runs on real vLLM servers: their processes, and a moment at which a replica certainly has unfinished trajectories."""

import contextlib

import psutil
from e2e import MARK, Run
from e2e_replay import Replay

from laminar.core.records import Trajectory, TrajectoryState

START_S = 600.0  # two servers import vLLM on two busy cores
WAIT_S = 240.0
ENGINE = "VLLM::EngineCore"
API_SERVER = "vllm.entrypoints.openai.api_server"
OVERRIDES = (
    "controller.start_timeout_s=600",
    "rollout.temperature=0.8",  # vLLM's log-probs have to be those after temperature
    "rollout.length_floor_median=90",  # long enough to be found in the middle
    "rollout.length_floor_p99=99",
    "rollout.max_concurrent=16",
    # All groups that may be in flight make one batch: no new version comes before those of a killed replica went on
    "buffer.max_groups=8",
    "trainer.batch_prompts=8",
    "repack.enabled=false",  # so what moves, moves because of the fault
    "trainer.lr=1e-4",
)
"""Of the quickstart's `longtail.toml`."""


def server_process(run: Run, worker: str, word: str) -> psutil.Process:
    """The process of that replica's server with this word in its command line: ENGINE, API_SERVER."""
    for process in run.marked():
        with contextlib.suppress(psutil.NoSuchProcess):
            if word in process.cmdline() and process.environ().get("LAMINAR_PROCESS") == worker:
                return process
    raise AssertionError(f"no {word} of {worker} among the processes with {MARK}\n{run.output}")


def in_flight(run: Run, worker: str) -> list[Trajectory]:
    """What the replica generates and has sent tokens of, by the log."""
    return [
        each
        for each in Replay(run).core.state.trajectories.values()
        if each.worker == worker and each.state is TrajectoryState.GENERATING and each.num_tokens
    ]


def until_the_next_event(run: Run) -> None:
    """Wait for one more event in the log."""
    query = "SELECT count(*) FROM events"
    before = run.query(query)
    run.until(lambda: run.query(query) > before, WAIT_S)


def suspend_in_the_middle(run: Run, worker: str) -> psutil.Process:
    """The replica's engine, stopped while it certainly has unfinished trajectories."""
    while True:
        run.until(lambda: run.status()["replicas"].get(worker, {}).get("generating"), START_S)
        run.until(lambda: in_flight(run, worker), WAIT_S)
        engine = server_process(run, worker, ENGINE)
        engine.suspend()
        until_the_next_event(run)
        if in_flight(run, worker):
            return engine
        engine.resume()
