"""The report of `laminar.controller.whystalled` as text, and `--why-stalled`, which gets it from a running controller."""

import io
import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from laminar.controller import asking
from laminar.controller.rundir import RunDirectory

WIDTH = 160  # of a report in a file


def ask(run: RunDirectory) -> dict[str, Any]:
    """The report of the controller of this run. Raises ConfigError when none answers."""
    return json.loads(asking.ask(asking.Address.of_run(run), "GET", "/v1/why-stalled"))  # type: ignore[no-any-return]


def text(report: dict[str, Any]) -> str:
    """For a file."""
    file = io.StringIO()
    show(report, Console(file=file, width=WIDTH))
    return file.getvalue()


def show(report: dict[str, Any], console: Console) -> None:
    """Everything, the most telling first."""
    console.print(_headline(report), markup=False, highlight=False)
    for cycle in report["cycles"]:
        ring = " → ".join([*cycle, cycle[0]])
        console.print(f"these wait for one another, in a ring: {ring}", style="bold red", markup=False, highlight=False)
    console.print(_waits(report["waits"]))
    console.print(_channels(report["channels"]))
    for worker, answer in report["workers"].items():
        _stack(console, str(worker), answer.get("stacks", answer.get("error", "")).splitlines())
    _controller(report["controller"], console)


def _controller(report: dict[str, Any], console: Console) -> None:
    counts = (
        f"{report['events_not_on_disk']} events and {report['actions_waiting_for_the_disk']} actions wait for the disk"
    )
    failure = f"; the log cannot be written: {report['log_failure']}" if report["log_failure"] else ""
    console.print(f"\nthe controller: {counts}{failure}; {report['num_tasks']} tasks", markup=False, highlight=False)
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for task in report["tasks"]:
        alike.setdefault(tuple(task["stack"]), []).append(task)
    for stack, tasks in alike.items():
        more = f" and {len(tasks) - 1} more" if len(tasks) > 1 else ""
        _stack(console, f"task {tasks[0]['name']}{more}, for {_age(tasks[0]['age_s'])} or longer", list(stack))
    for name, lines in report["threads"].items():
        _stack(console, f"thread {name}", lines)


def _headline(report: dict[str, Any]) -> str:
    stalled_s = report["stalled_for_s"]
    if report["finished"]:
        return f"{report['run']}: the run is over ({report['finished']})"
    if stalled_s is None:
        return f"{report['run']}: something useful happens, or nothing has to; this is who waits for what"
    return f"{report['run']}: nothing useful has happened for {_age(stalled_s)}; this is who waits for what"


def _waits(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("who", "waits for", "which is", "for", "given up in", "ended by"):
        table.add_column(name, justify="right" if name in ("for", "given up in") else "left", overflow="fold")
    for row in rows:
        table.add_row(
            *(Text(cell) for cell in (row["who"], row["what"], ", ".join(row["on"]))),
            *(Text(_age(row[key])) for key in ("for_s", "given_up_in_s")),
            Text(row["ends"]),
        )
    return table


def _channels(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    names = (
        "channel",
        "connected",
        "not acknowledged",
        "waiting for the disk",
        "not yet written",
        "heard, not on disk",
    )
    for name in names:
        table.add_column(name, justify="left" if name in ("channel", "connected") else "right")
    for row in rows:
        table.add_row(
            Text(row["worker"]),
            "yes" if row["connected"] else "no",
            f"{row['not_acknowledged_frames']} frames, {row['not_acknowledged_bytes']} bytes",
            *(str(row[key]) for key in ("waiting_for_the_disk", "not_yet_written", "heard_and_not_on_disk")),
        )
    return table


def _stack(console: Console, name: str, lines: list[str]) -> None:
    console.print(f"\n{name}", style="bold", markup=False, highlight=False)
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
