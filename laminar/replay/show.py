"""What replays found, for people and as plain data."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from laminar.ids import format_id
from laminar.replay.shadow import Choice, Shadowing, Statistics
from laminar.replay.verify import Verdict
from laminar.replay.whatif import Comparison

CHOICES_SHOWN = 40  # a screen; --json has all
CANNOT = """\
Each choice is made from the buffer as the run's real choices left it: this tells how the samplers differ on the same buffers.
What the run would have become it cannot tell: other batches give other weights, lengths and rewards, and another buffer."""


# ---- verify ------------------------------------------------------------------------------------------------


def plain_verdict(verdict: Verdict) -> dict[str, Any]:
    """For JSON."""
    divergence = verdict.divergence and verdict.divergence._asdict()
    boots = [boot.number for boot in verdict.life.boots]
    return {"boots": boots, **{**verdict._asdict(), "life": verdict.life.number, "divergence": divergence}}


def told(verdict: Verdict, run: Path) -> str:
    """For people. `run`: where it was recorded."""
    name = verdict.life.name
    if verdict.unusable:
        return f"{name}: not compared: {verdict.unusable}"
    compared = f"{verdict.num_answers} answers and {verdict.num_states} whole states compared"
    lines = [f"{name}: no divergence in {verdict.num_events} events; {compared}"]
    if found := verdict.divergence:
        lines = [f"{name}: diverged at event {found.seq} of boot {found.boot} ({found.event}), after {verdict.num_events} events "
                 f"without a difference; {compared}"]  # fmt: skip
        lines += [f"  {line}" for line in (*found.what, found.code)]
        there = f"goto event {found.seq - 1}; step" if found.seq > 1 else "step"
        lines.append(
            f'  look at it: python -m laminar.console --log {shlex.quote(str(run))} --boot {found.boot} -c "{there}"'
        )
    return "\n".join([*lines, *(f"  {note}" for note in verdict.notes)])


# ---- shadow ------------------------------------------------------------------------------------------------


def plain_shadowing(found: Shadowing) -> dict[str, Any]:
    """For JSON."""
    choices = [{**choice._asdict(), "agreement": choice.agreement} for choice in found.choices]
    return {**found._asdict(), "choices": choices, "real": found.real._asdict(), "shadow": found.shadow._asdict()}


def shadowed(found: Shadowing) -> str:
    """For people."""
    if not found.choices:
        return "\n".join(["no batch was taken: there is nothing to choose", *found.notes])
    return "\n".join([*_of_choices(found), "", *_of_statistics(found), "", *_summary(found), *found.notes, "", CANNOT])


def _of_choices(found: Shadowing) -> Iterator[str]:
    yield f"{'boot':>6} {'step':>6} {'event':>8} {'buffered':>9} {'both chose':>11}  chosen by {found.sampler} only, instead of"
    left_out = len(found.choices) - CHOICES_SHOWN
    if left_out > 0:
        yield f"… {left_out} batches before these (--json has all)"
    for choice in found.choices[-CHOICES_SHOWN:]:
        share = f"{choice.agreement:.0%}"
        place = f"{choice.boot:>6} {choice.step:>6} {choice.seq:>8}"
        yield f"{place} {choice.num_buffered:>9} {share:>11}  {_instead(choice)}"


def _instead(choice: Choice) -> str:
    if choice.error:
        return f"failed: {choice.error}"
    if not choice.shadow:
        return "would have waited for another group"
    own = [group for group in choice.shadow if group not in choice.real]
    real = [group for group in choice.real if group not in choice.shadow]
    if not own:
        return "" if choice.real == choice.shadow else "(in another order)"
    return f"{_names(own)} instead of {_names(real)}"


def _names(groups: Sequence[int]) -> str:
    shown = ", ".join(f"g{format_id(group)}" for group in groups[:3])
    return shown if len(groups) <= 3 else f"{shown} and {len(groups) - 3} more"


def _of_statistics(found: Shadowing) -> Iterator[str]:
    yield f"{'':32}{'real':>12}{found.sampler[-20:]:>22}"
    for name, real, other in _rows(found.real, found.shadow):
        yield f"{name:32}{real:>12}{other:>22}"
    for staleness in sorted({**found.real.staleness, **found.shadow.staleness}):
        numbers = found.real.staleness.get(staleness, 0), found.shadow.staleness.get(staleness, 0)
        yield f"{f'groups of staleness {staleness}':32}{numbers[0]:>12}{numbers[1]:>22}"


def _rows(real: Statistics, other: Statistics) -> Iterator[tuple[str, str, str]]:
    for field, name in {
        "num_groups": "groups",
        "staleness_mean": "staleness, mean",
        "staleness_max": "staleness, largest",
        "reward_mean": "reward, mean",
        "reward_spread_mean": "reward spread in a group, mean",
        "no_advantage_share": "groups without advantage, share",
        "length_mean": "response tokens, mean",
        "length_max": "response tokens, most",
        "age_mean_s": "seconds in the buffer, mean",
    }.items():
        yield name, _number(getattr(real, field)), _number(getattr(other, field))


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _summary(found: Shadowing) -> Iterator[str]:
    yield (
        f"{len(found.choices)} batches: {found.num_same} the same, {found.agreement:.1%} of a batch chosen by both on average; "
        f"{found.num_waits} times it would have waited, {found.num_errors} times it failed"
    )
    if error := next((choice.error for choice in found.choices if choice.error), ""):
        yield f"the first failure: it {error}"


# ---- what-if -----------------------------------------------------------------------------------------------

FIGURES = {
    "step_s": "seconds per train step",
    "trained_tokens_per_s": "trained tokens/s",
    "generated_tokens_per_s": "generated tokens/s",
    "trainer_busy": "trainer busy, share",
    "replicas_busy": "replicas busy, share",
    "buffered_groups": "complete groups in the buffer, mean",
    "staleness_mean": "staleness of what is trained, mean",
    "staleness_max": "staleness of what is trained, largest",
    "response_s": "seconds per response",
    "moved": "trajectories moved",
    "dropped": "trajectories dropped",
}
TELLS = """\
Simulated are scheduling and time: the same core, the recorded lengths, costs and faults, in virtual time. That tells
what a change does to throughput, waiting and staleness, as far as machines cost what they cost in this run; what
differs by less than the error of the simulation as it was says nothing. It cannot tell what other batches would have
taught: rewards, and how lengths go on, are the recorded ones. Prefill and whatever the machines did besides is in the
costs as measured, also where the change would make it more or less."""


def plain_comparison(found: Comparison) -> dict[str, Any]:
    """For JSON. `error`: of the simulation as it was, a share of the real value; None = that is 0."""
    error = {name: _relative(getattr(found.again, name), getattr(found.real, name)) for name in FIGURES}
    runs = {"real": found.real._asdict(), "again": found.again._asdict(), "changed": found.changed._asdict()}
    return {**runs, "error": error, "notes": found.notes, "tells": TELLS.replace("\n", " ")}


def compared(found: Comparison) -> str:
    """For people."""
    lines = [f"{'':40}{'real':>12}{'simulated':>12}{'error':>9}{'changed':>12}{'effect':>9}"]
    for name, text in FIGURES.items():
        real, again, changed = (getattr(figures, name) for figures in (found.real, found.again, found.changed))
        cells = [_short(real), _short(again), _percent(again, real), _short(changed), _percent(changed, again)]
        lines.append(f"{text:40}{cells[0]:>12}{cells[1]:>12}{cells[2]:>9}{cells[3]:>12}{cells[4]:>9}")
    lines.append(f"over {found.real.steps} train steps, of the changed run {found.changed.steps}")
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes), "", TELLS])


def _relative(value: float, of: float) -> float | None:
    return value / of - 1.0 if of else None


def _percent(value: float, of: float) -> str:
    relative = _relative(value, of)
    return "–" if relative is None else f"{relative:+.1%}"


def _short(value: float) -> str:
    if isinstance(value, int) or value >= 1000.0:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"
