"""What a person sees while a run goes on: a live panel on a terminal, one plain line per step elsewhere."""

import os
import sys
import time
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from laminar.config import Config
from laminar.controller.telemetry import Telemetry
from laminar.core.records import State
from laminar.wire import RelayReport


class Display(Protocol):
    """Progress for people."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def on_step(self) -> None:
        """A step finished; its metrics are the telemetry's last."""

    def refresh(self) -> None:
        """Some time has passed."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def display_of(config: Config, state: State, telemetry: Telemetry) -> Display:
    """As configured: live on a terminal, plain elsewhere."""
    wanted = config.controller.console
    live = wanted == "live" or (wanted == "auto" and os.isatty(1))
    return (LiveDisplay if live else PlainDisplay)(state, telemetry, config.run.steps)


def last_step(state: State, configured: int) -> int:
    """The step with which the run ends, as an operator may have changed it."""
    amended = state.amended.get("steps", configured)
    return min(int(amended or configured), state.stop_after or sys.maxsize)


def step_line(metrics: dict[str, float], steps: int, state: State) -> str:
    """One finished step in one line."""
    versions = " ".join(f"{name}@{replica.version or '–'}" for name, replica in state.replicas.items())
    parts = [
        f"step {int(metrics['step'])}/{steps}",
        f"reward {metrics.get('reward/mean', float('nan')):.3f}",
        f"entropy {metrics.get('actor/entropy', float('nan')):.3f}",
        f"grad {metrics.get('actor/grad_norm', float('nan')):.2f}",
        f"gen {metrics['perf/generation_tokens_per_s']:.0f} tok/s",
        f"train {metrics['perf/training_tokens_per_s']:.0f} tok/s",
        f"buffer {int(metrics['buffer/depth_groups'])}",
        f"staleness {metrics['off_policy/s_train/mean']:.2f} (max {int(metrics['off_policy/s_train/max'])})",
        f"{metrics['timing/wall_s']:.2f} s",
        versions,
    ]
    return " | ".join(parts)


class PlainDisplay:
    """For logs and pipes."""

    def __init__(self, state: State, telemetry: Telemetry, steps: int) -> None:
        self._state, self._telemetry, self._steps = state, telemetry, steps

    def say(self, text: str) -> None:
        try:
            print(text, flush=True)
        except (
            OSError
        ):  # the reader is gone, or its disk full; that is no reason to end the run, nor to fail in the last flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def on_step(self) -> None:
        self.say(step_line(self._telemetry.history[-1], last_step(self._state, self._steps), self._state))

    def refresh(self) -> None:
        """Nothing moves in a log."""

    def close(self) -> None:
        """Nothing to restore."""


class LiveDisplay:
    """For terminals."""

    def __init__(self, state: State, telemetry: Telemetry, steps: int) -> None:
        self._state, self._telemetry, self._steps = state, telemetry, steps
        self._live = Live(console=Console(), auto_refresh=False, transient=False)
        self._live.start()

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def on_step(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        self._live.update(self._render(), refresh=True)

    def close(self) -> None:
        self.refresh()
        self._live.stop()

    def _render(self) -> Group:
        relays = [self._relays()] if len(self._state.relays) > 1 else []
        return Group(self._progress(), self._numbers(), self._replicas(), *relays)

    def _progress(self) -> Table:
        done, steps = self._state.trainer.step, last_step(self._state, self._steps)
        eta = self._telemetry.seconds_per_step() * (steps - done)
        row = Table.grid(padding=(0, 1))
        row.add_row(
            Text(f"step {done}/{steps}", style="bold"),
            ProgressBar(total=steps, completed=done, width=40),
            Text(self._held() or (f"ETA {time.strftime('%M:%S', time.gmtime(eta))}" if eta else self._phase())),
        )
        return row

    def _held(self) -> str:
        """That an operator or a breakpoint holds the run, which else looks dead."""
        return f"held: {', '.join(self._state.holds)}" if self._state.holds else ""

    def _phase(self) -> str:
        if not self._state.trainer.ready:
            return "starting the workers"
        if not any(replica.version for replica in self._state.replicas.values()):
            return "publishing the first weights"
        return "generating" if self._state.trainer.step < last_step(self._state, self._steps) else "finishing"

    def _numbers(self) -> Table:
        metrics = self._telemetry.history[-1] if self._telemetry.history else {}
        table = Table(box=None, padding=(0, 2))
        columns = (
            ("reward", metrics.get("reward/mean"), ".3f"),
            ("entropy", metrics.get("actor/entropy"), ".3f"),
            ("gen tok/s", metrics.get("perf/generation_tokens_per_s"), ",.0f"),
            ("train tok/s", metrics.get("perf/training_tokens_per_s"), ",.0f"),
            ("buffer groups", float(len(self._state.buffer)), ".0f"),
            ("staleness mean", metrics.get("off_policy/s_train/mean"), ".2f"),
            ("max", metrics.get("off_policy/s_train/max"), ".0f"),
            ("trainer idle", metrics.get("perf/trainer_idle_ratio"), ".0%"),
            ("rollouts idle", metrics.get("perf/rollout_idle_ratio"), ".0%"),
            ("loop lag ms", 1e3 * metrics["event_loop_lag/max"] if metrics else None, ".0f"),
        )
        for name, _, _ in columns:
            table.add_column(name, justify="right")
        table.add_row(*("–" if value is None else format(value, form) for _, value, form in columns))
        return table

    def _relays(self) -> Table:
        """In the order of the chain."""
        table = Table(box=None, padding=(0, 2))
        for name in ("relay", "links", "newest", "receiving", "sent MB", "on the wire"):
            table.add_column(name, justify="left" if name in ("relay", "links", "newest") else "right")
        for worker in self._state.chain.order:
            report, held = self._telemetry.relays.get(worker, RelayReport()), self._state.relays[worker].held
            coming = report.receiving
            table.add_row(
                worker,
                report.transport or "–",
                str(held[-1]) if held else "–",
                f"{coming.version} {coming.num_bytes / coming.total_bytes:.0%}" if coming else "–",
                f"{report.sent_bytes / 1e6:,.1f}",
                f"{report.wire_bytes / max(1, report.sent_bytes):.1%}" if report.sent_bytes else "–",
            )
        return table

    def _replicas(self) -> Table:
        table = Table(box=None, padding=(0, 2))
        for name in ("replica", "state", "version", "generating", "rewarding", "KV tokens"):
            table.add_column(name, justify="left" if name in ("replica", "state", "version") else "right")
        for replica in self._state.replicas.values():
            version = f"{replica.version or '–'}" + (f" → {replica.target}" if replica.target else "")
            table.add_row(
                replica.id,
                replica.state.value,
                version,
                str(replica.num_generating),
                str(len(replica.attempts) - replica.num_generating),
                f"{replica.kv_tokens:,}",
            )
        return table
