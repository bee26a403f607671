"""The invariant report of a run with faults: clean or not, and why."""

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from laminar.chaos import journal, outcomes, verdicts
from laminar.chaos.evidence import Evidence
from laminar.chaos.outcomes import Outcome
from laminar.core.settings import Settings

REWARD_SHARE = 0.1  # of the steps, at either end, over which the reward is averaged
CLEAN, NOT_CLEAN = "clean", "NOT CLEAN"


class Report(msgspec.Struct, kw_only=True):
    """All of it, as `--json` prints it."""

    run: str
    clean: bool
    seconds: float
    num_steps: int
    num_faults: int
    """That struck."""
    num_kinds: int
    faults: list[Outcome]
    checks: dict[str, list[str]]
    """Findings against each invariant; none = it holds."""
    reward: tuple[float, float] | None
    """Mean of the first and of the last tenth of the steps."""
    drawn: int
    """Trajectories, and below where they are."""
    places: dict[str, int]
    tokens: int
    """Response tokens received, and below where they are."""
    token_places: dict[str, int]


def make(run: Path, settings: Settings | None = None, also: dict[str, list[str]] | None = None) -> Report:
    """Judge a run by what it left. `also`: further checks with their findings. Raises ConfigError."""
    strikes = journal.read(run)
    evidence = Evidence(run, settings)
    faults = outcomes.outcomes(evidence, strikes)
    checks = {
        "every fault within its cost": [
            f"fault {f.number} {f.kind} {f.target}: {p}" for f in faults for p in f.problems
        ],
        "no loss without a fault": outcomes.unexplained(evidence, strikes),
        **verdicts.judge(evidence, strikes),
        **(also or {}),
    }
    struck = [fault for fault in faults if not fault.skipped]
    books = evidence.core.state.ledger
    return Report(
        run=str(run),
        clean=not any(checks.values()),
        seconds=evidence.seconds,
        num_steps=max((step.step for step in evidence.trained), default=0),
        num_faults=len(struck),
        num_kinds=len({fault.kind for fault in struck}),
        faults=faults,
        checks=checks,
        reward=_reward(evidence),
        drawn=books.trajectories.total,
        places=_places(books.trajectories),
        tokens=books.tokens.total,
        token_places=_places(books.tokens),
    )


def _reward(evidence: Evidence) -> tuple[float, float] | None:
    rewards = list(evidence.tables.metrics.get("reward/mean", {}).values())
    if not rewards:
        return None
    num = max(1, round(len(rewards) * REWARD_SHARE))
    return sum(rewards[:num]) / num, sum(rewards[-num:]) / num


def _places(account: object) -> dict[str, int]:
    books = msgspec.to_builtins(account)
    places = {name: books[name] for name in ("committed", "leased", "buffered", "in_flight")}
    return places | {f"dropped ({reason})": num for reason, num in books["dropped"].items()}


# ---- for people --------------------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Print it."""
    console.print(_table(report))
    for name, findings in report.checks.items():
        console.print(f"[{'red' if findings else 'green'}]{'FAILED' if findings else 'holds':<7}[/] {name}")
        for finding in findings:
            console.print(f"        {finding}", markup=False)
    _show_totals(report, console)
    verdict = CLEAN if report.clean else NOT_CLEAN
    text = (
        f"{report.num_faults} faults of {report.num_kinds} kinds in {report.seconds:.0f} s, {report.num_steps} steps: "
    )
    console.print(f"{text}[bold {'green' if report.clean else 'red'}]{verdict}[/]", highlight=False)


def _show_totals(report: Report, console: Console) -> None:
    for name, total, places in (
        ("trajectories drawn", report.drawn, report.places), ("tokens received", report.tokens, report.token_places)
    ):  # fmt: skip
        parts = " + ".join(f"{num} {place}" for place, num in places.items() if num or place == "committed")
        console.print(f"{total} {name} = {parts}", markup=False, highlight=False)
    if report.reward:
        first, last = report.reward
        console.print(
            f"reward {first:.3f} → {last:.3f} (mean of the first and last tenth of the steps)", highlight=False
        )


def _table(report: Report) -> Table:
    table = Table(title=f"faults in {report.run}", title_justify="left")
    for name in ("", "at, s", "fault", "target", "lasted, s"):
        table.add_column(name, justify="left" if name in ("fault", "target") else "right", no_wrap=True)
    for name in ("noticed, s", "by", "recovered, s", "lost", "may cost", "steps", "generation", ""):
        table.add_column(name, justify="left" if name in ("by", "lost", "may cost", "") else "right")
    for fault in report.faults:
        table.add_row(*_cells(fault))
    return table


def _cells(fault: Outcome) -> list[str]:
    what = [str(fault.number), f"{fault.at_s:.1f}", fault.kind, fault.target, _s(fault.lasted_s or None)]
    if fault.skipped:
        return [*what, "", f"skipped: {fault.skipped}", "", "", "", "", "", ""]
    lost = ", ".join(f"{num} tokens ({reason})" for reason, num in fault.lost_tokens.items())
    redone = f"steps redone: {fault.num_redone}" if fault.num_redone else ""
    generation = "" if fault.generation is None else f"{fault.generation:.0%}"
    return [
        *what,
        _s(fault.noticed_s),
        fault.noticed_by,
        _s(fault.recovered_s),
        ", ".join(filter(None, (lost, redone))),
        fault.cost,
        str(fault.num_steps),
        generation,
        "; ".join(fault.problems) and "[red]![/]",
    ]


def _s(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.2f}"
