"""Hurt real vLLM servers and print what came of it: `python scripts/vllm_faults.py [WORD …]`.

Every fault is to end as docs/vllm.md says under Failures. WORDs choose the faults whose names contain one of them. A run with two
servers takes the faults in mid-generation, the others have a run each that cannot start; at the end two servers without a run
move greedy requests. All of them need 10 to 25 minutes on two cores. Exit code 1 if any ended otherwise. The interpreter with
vLLM is LAMINAR_VLLM_PYTHON, else that of .venv-vllm.
"""

import argparse
import asyncio
import http.server
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from e2e import ROOT, Run, ledger_is_closed
from e2e_replay import Replay, keep_tokens, read_tokens
from e2e_vllm import API_SERVER, OVERRIDES, START_S, WAIT_S, server_process, suspend_in_the_middle
from vllm_engine_world import PROMPT, Bench, not_the_same, own_engine
from vllm_world import MODEL, PYTHON

PROGRESS_TIMEOUT_S = 20  # the default, 60 s, would only be waited for
NUM_MOVED, NUM_TOKENS = 32, 100
TOO_LONG_TOKENS = 1_000_000  # needs 1.5 GiB of KV cache for one request of the quickstart's model, and there is 1 GiB
WORDS_CHARS = 200  # of what was said, in the table
LAST_LINES = r"its last lines \(.*rollout-\d\.vllm\.log\)"


class Row(msgspec.Struct):
    """What came of one fault."""

    fault: str
    documented: str
    happened: str
    seconds: float
    is_bad: bool = False


class Loss(msgspec.Struct, frozen=True):
    """A fault of a replica that generates."""

    fault: str
    worker: str
    hurt: Callable[[Run, str], None]
    said: str
    """What its alarm says."""


class Refusal(msgspec.Struct, frozen=True):
    """A run that cannot start."""

    fault: str
    said: str
    """What the run's last words begin with."""
    shown: str = ""
    """What one of the server's own last lines says."""
    options: str = ""
    """Of the replica's line in the hosts file."""
    overrides: Callable[[Path], tuple[str, ...]] = lambda directory: ()
    """Of the configuration."""


# ---- replicas that are lost --------------------------------------------------------------------------------------------


def kill_engine(run: Run, worker: str) -> None:
    """SIGKILL to the process in which the model runs."""
    suspend_in_the_middle(run, worker).kill()


def kill_api_server(run: Run, worker: str) -> None:
    """SIGKILL to the process that answers HTTP."""
    engine = suspend_in_the_middle(run, worker)
    server_process(run, worker, API_SERVER).kill()
    engine.resume()


def stop_engine(run: Run, worker: str) -> None:
    """SIGSTOP to the process in which the model runs."""
    suspend_in_the_middle(run, worker)


LOSSES = (
    Loss("SIGKILL of the engine process", "rollout-1", kill_engine, rf"vLLM .*{LAST_LINES}"),
    Loss("SIGKILL of the API server", "rollout-0", kill_api_server, rf"vLLM .*signal 9\).*{LAST_LINES}"),
    Loss(
        "SIGSTOP of the engine process", "rollout-1", stop_engine, rf"vLLM runs, and gave no token for .*{LAST_LINES}"
    ),
)
LOSS_DOCUMENTED = (
    "replica lost: its trajectories go on elsewhere from their last flushed token, the server is started again"
)


def lose_replicas(losses: list[Loss]) -> Iterator[Row]:
    """One run that takes one fault after the other, and at its end has neither lost nor doubled anything."""
    with tempfile.TemporaryDirectory(prefix="laminar-faults-") as name:
        directory = Path(name)
        hosts = directory / "hosts.txt"
        hosts.write_text(f"localhost trainer\nlocalhost rollout engine=vllm replicas=2 python={vllm_python()}\n")
        settings = ("run.steps=100000", f"rollout.progress_timeout_s={PROGRESS_TIMEOUT_S}")
        with Run.start(directory, hosts, *OVERRIDES, *settings, config="longtail.toml") as run:
            kept = keep_tokens(run)
            for loss in losses:
                yield lose_replica(run, loss)
            began = time.monotonic()
            run.signal(signal.SIGINT)
            assert run.wait(WAIT_S) == 0, run.output
        happened = check_continuations(run, kept)
        yield Row("all of these", "what was generated is kept, nothing is doubled", happened, time.monotonic() - began)


def lose_replica(run: Run, loss: Loss) -> Row:
    """Hurt one replica while the other works; wait until it generates again."""
    for worker in ("rollout-0", "rollout-1"):
        run.until(lambda worker=worker: is_working(run, worker), START_S)
    before, restarts = run.status()["failovers"], run.status()["replicas"][loss.worker]["restarts"]
    loss.hurt(run, loss.worker)
    began = time.monotonic()
    alarm = run.until_said(rf"^alarm: worker-lost: {loss.worker} was lost: {loss.said}", WAIT_S).string
    found_s = time.monotonic() - began
    run.until(lambda: sum(gone_on(run, before).values()), WAIT_S)
    run.until(lambda: run.status()["replicas"][loss.worker]["restarts"] == restarts + 1, WAIT_S)
    run.until(lambda: is_working(run, loss.worker), START_S)
    how = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in gone_on(run, before).items() if number)
    lost = re.sub(r"^.* was lost: |; its last lines.*$|\([^)]*\.log\).*$", "", alarm)
    happened = f"found after {found_s:.1f} s: “{shortened(lost)}”; went on: {how}; generates again"
    return Row(loss.fault, LOSS_DOCUMENTED, happened, time.monotonic() - began)


def is_working(run: Run, worker: str) -> bool:
    """Whether it has something to generate."""
    replica = run.status()["replicas"].get(worker, {}) if (run.path / "url").exists() else {}
    return replica.get("state") == "generating" and replica["generating"] > 0


def gone_on(run: Run, before: dict[str, int]) -> dict[str, int]:
    """How lost replicas' trajectories went on since then."""
    return {name: number - before[name] for name, number in run.status()["failovers"].items()}


def check_continuations(run: Run, kept: Path) -> str:
    """Every continuation begins after the last flushed token, some were trained, the ledger closes. AssertionError if not."""
    responses, moves = read_tokens(kept).responses, Replay(run).moves
    for move in moves:
        parts = responses[move.trajectory]
        before = sum(len(part.tokens) for part in parts if part.attempt < move.attempt)
        after = [part.start for part in parts if part.attempt >= move.attempt]
        assert before == move.num_flushed > 0, move
        assert not after or after[0] == before, move
    trained = {id for (id,) in run.query("SELECT id FROM trajectories WHERE trained_at IS NOT NULL")}
    num_trained = len(trained & {move.trajectory for move in moves})
    assert num_trained, "no continuation was trained"
    assert ledger_is_closed(run.output), run.output
    assert run.num_dropped().keys() <= {"stopped"}, run.num_dropped()
    return f"{len(moves)} continuations begin at their last flushed token, {num_trained} of them trained; ledger closed"


# ---- runs that cannot start --------------------------------------------------------------------------------------------


def long_model(directory: Path) -> tuple[str, ...]:
    """The quickstart's model with a context for which there is not enough memory."""
    model = shutil.copytree(MODEL, directory / "model")
    config = msgspec.json.decode((model / "config.json").read_bytes())
    config["max_position_embeddings"] = TOO_LONG_TOKENS
    (model / "config.json").write_bytes(msgspec.json.encode(config))
    return (f"model.path={model}",)


DID_NOT_START = rf"rollout-0 did not start: vLLM did not start \(ended with exit code \d\); {LAST_LINES}"
REFUSALS = (
    Refusal("unknown flag", DID_NOT_START, "unrecognized arguments: --no-such-flag", "vllm.no-such-flag=1"),
    Refusal(
        "model that does not fit", DID_NOT_START, "ValueError: To serve at least one request", overrides=long_model
    ),
    Refusal(
        "context longer than the model's",
        DID_NOT_START,
        r"max_model_len \(4096\) is greater than",
        overrides=lambda directory: ("model.context_tokens_max=4096",),
    ),
    Refusal(
        "url= of another HTTP server",
        r"rollout-0 did not start: what answers at http://127\.0\.0\.1:\d+ is no vLLM server",
        options="url=http",
    ),
    Refusal(
        "url= of a port that never answers",
        r"rollout-0 did not start: vLLM does not answer /version: nothing within \d+ s \(the server at http://127\.0\.0\.1:\d+",
        options="url=silent",
    ),
)


def refuse(refusal: Refusal) -> Row:
    """Start the run and read its last words."""
    with tempfile.TemporaryDirectory(prefix="laminar-faults-") as name, stranger(refusal.options) as options:
        directory = Path(name)
        hosts = directory / "hosts.txt"
        hosts.write_text(f"localhost trainer\nlocalhost rollout engine=vllm {options}\n")
        began = time.monotonic()
        with Run.start(directory, hosts, *refusal.overrides(directory), config="../vllm_cpu/config.toml") as run:
            code = run.wait(START_S)
        took_s = time.monotonic() - began
        first, *lines = run.output.partition("the run failed: ")[2].splitlines() or [""]
        shown = [line.strip() for line in lines if re.search(refusal.shown, line)]
        assert code == 1, run.output
        assert re.match(refusal.said, first), run.output
        assert shown, run.output
    words = f"{first.partition('; its last lines')[0]} … {shown[0]}" if refusal.shown else first
    documented = "the run ends, with the server's last lines" if refusal.shown else "the run ends, with the address"
    return Row(refusal.fault, documented, f"exit code {code}: “{shortened(words)}”", took_s)


def shortened(words: str) -> str:
    return words if len(words) <= WORDS_CHARS else f"{words[:WORDS_CHARS]}…"


@contextmanager
def stranger(options: str) -> Iterator[str]:
    """The options of the replica's line, with the address of something that is no vLLM server where they ask for one."""
    if not options.startswith("url="):
        yield f"python={vllm_python()} {options}"
    elif options == "url=http":
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"url=http://127.0.0.1:{server.server_port}"
            server.shutdown()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield f"url=http://127.0.0.1:{listener.getsockname()[1]}"


# ---- a move between two servers ----------------------------------------------------------------------------------------


def move() -> Row:
    """Greedy requests, aborted in mid-generation on one server and continued on another, beside unmoved ones."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="laminar-faults-") as directory:
        num_moved, num_ties = asyncio.run(move_between_servers(Path(directory)))
    happened = f"{num_moved} of {NUM_MOVED} moved in the middle, {num_ties} diverged, where the top two log-probs were < 1e-4 apart"
    return Row("move between two servers, greedy", "the same tokens, up to ties", happened, time.monotonic() - began)


async def move_between_servers(directory: Path) -> tuple[int, int]:
    """How many were moved, how many of them diverged at a tie. AssertionError if one diverged elsewhere."""
    engines = [own_engine(directory / f"rollout-{number}.vllm.log") for number in range(2)]
    try:
        for engine in engines:
            await engine.start(lambda key: None)
        return await moved_and_unmoved(*(Bench(engine) for engine in engines))
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


async def moved_and_unmoved(source: Bench, destination: Bench) -> tuple[int, int]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prompts = [[20 + number, *PROMPT] for number in range(NUM_MOVED)]
    ask = partial(Bench.submit, temperature=0.0, max_tokens=NUM_TOKENS)
    keys = [ask(source, prompt=prompt) for prompt in prompts]
    unmoved = [(await source.finish(key))[0] for key in keys]
    keys = [ask(source, prompt=prompt) for prompt in prompts]
    await source.until(lambda: all(key in source.outputs for key in keys))
    for key in keys:
        source.engine.abort(key)
    prefixes = [(await source.finish(key))[0] for key in keys]
    middle = [index for index, prefix in enumerate(prefixes) if len(prefix) < NUM_TOKENS]
    assert len(middle) > NUM_MOVED // 2, f"only {len(middle)} were aborted in time"
    rests = {index: ask(destination, prefixes[index], prompt=prompts[index]) for index in middle}
    num_ties = 0
    for index, key in rests.items():
        moved = prefixes[index] + (await destination.finish(key))[0]
        assert len(moved) == NUM_TOKENS
        num_ties += not_the_same(model, prompts[index], unmoved[index], moved)
    return len(middle), num_ties


# ---- the table ---------------------------------------------------------------------------------------------------------


def vllm_python() -> str:
    """Absolute, and not resolved: a link into another environment would lose this one's packages."""
    return os.path.abspath(PYTHON)


def rows(words: list[str]) -> Iterator[Row]:
    """One per chosen fault."""

    def chosen(fault: str) -> bool:
        return not words or any(word in fault for word in words)

    if losses := [loss for loss in LOSSES if chosen(loss.fault)]:
        yield from guarded(", ".join(loss.fault for loss in losses), partial(lose_replicas, losses))
    for refusal in REFUSALS:
        if chosen(refusal.fault):
            yield from guarded(refusal.fault, lambda refusal=refusal: iter([refuse(refusal)]))
    if chosen("move between two servers"):
        yield from guarded("move between two servers", lambda: iter([move()]))


def guarded(fault: str, act: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Its rows; at the first that ends otherwise one that says so."""
    began = time.monotonic()
    try:
        yield from act()
    except AssertionError as error:
        yield Row(fault, "", f"BAD: {error}", time.monotonic() - began, is_bad=True)


def main() -> int:
    """Print the table, a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    words = parser.parse_args().words
    os.chdir(ROOT)
    num_bad = 0
    print("| fault | documented | what happened | s |\n|---|---|---|---|")
    for row in rows(words):
        num_bad += row.is_bad
        print(f"| {row.fault} | {row.documented} | {row.happened} | {row.seconds:.0f} |", flush=True)
    print(f"\n{num_bad} ended otherwise than documented")
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
