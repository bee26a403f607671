"""What it costs to record what the core answers: `python scripts/bench_answers.py runs/my-run [--rounds 5]`.

Replays the log and times, over all events, the core itself and `laminar.controller.answers`, which the controller calls after it.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from laminar.controller import answers  # noqa: E402 - the repository need not be installed
from laminar.replay.playback import Playback  # noqa: E402
from laminar.replay.recording import Recording  # noqa: E402


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with Recording(options.run) as recording:
        rounds = [measure(recording) for _ in range(options.rounds)]
        rows = "SELECT coalesce(sum(length(actions)), 0), count(*) FROM answers"
        num_bytes, num_answers = recording.query(rows)[0]
        (event_bytes,) = recording.query("SELECT sum(length(body)) FROM events")[0]
    core_us, answer_us = (statistics.median(times) for times in zip(*rounds, strict=True))
    print(
        f"core {core_us:.1f} µs an event, its answer {answer_us:.2f} µs an event: {answer_us / core_us:.1%} of the core's time"
    )
    print(f"{num_answers} answers, {num_bytes / max(1, event_bytes):.1%} of the bytes of the events")


def measure(recording: Recording) -> tuple[float, float]:
    """µs per event of the core, and of its answers."""
    playback = Playback(recording)
    handled_s = answered_s = 0.0
    num_events = 0
    while playback.next_event is not None:
        began = time.perf_counter()
        step = playback.step()
        handled = time.perf_counter()
        assert step is not None
        answers.answer(playback.core.state, step.actions, step.num_decisions)
        answered_s += time.perf_counter() - handled
        handled_s += handled - began
        num_events += 1
    return handled_s / num_events * 1e6, answered_s / num_events * 1e6


if __name__ == "__main__":
    main()
