"""The console's lines, answered on the live core: the same functions as in a simulation or on a log (`laminar.console`).

Invariants: a line is looked at and answered in one go, between two events, and its answer is bounded; what it changes is events in
the log like all others.
"""

from collections.abc import Callable, Mapping

from msgspec import structs

from laminar.console.answers import Answer, Cell, table
from laminar.console.commands import COMMANDS
from laminar.console.commands.fleet import show_relays
from laminar.console.language import Function, Language
from laminar.console.place import Reply, reply
from laminar.console.view import View
from laminar.controller.crew import Crew
from laminar.controller.runtime import Runtime
from laminar.controller.samplerchange import SamplerChange
from laminar.ids import WorkerId
from laminar.samplers import Samplers
from laminar.wire import Progress, RelayReport

LINE_CHARACTERS_MAX = 4096  # more than anybody types, and no work to refuse


class Console:
    """Answers lines about a run. `functions`: of the commands that need more than the core."""

    def __init__(self, runtime: Runtime, functions: Mapping[str, Function]) -> None:
        self._runtime = runtime
        self._language = Language(COMMANDS, functions)

    def answer(self, line: str) -> Reply:
        """What the core says, or did, and where the run is then."""
        if len(line) > LINE_CHARACTERS_MAX:
            answer = Answer(error=f"a line of {len(line)} characters: at most {LINE_CHARACTERS_MAX} are taken")
        else:
            answer = self._language.answer(self._view(), line, self._runtime.post)
        return reply(self._view(), answer)

    def look(self) -> Reply:
        """Only where the run is."""
        return reply(self._view(), Answer())

    def _view(self) -> View:
        return View(self._runtime.core, target="live", now=self._runtime.now(), began=self._runtime.began)


def functions(
    runtime: Runtime,
    samplers: Samplers,
    crew: Crew,
    alarm: Callable[[str, str], None],
    reports: Mapping[WorkerId, RelayReport],
) -> dict[str, Function]:
    """The commands that need more than the core. `reports`: what relays said of themselves last."""
    choose = SamplerChange(runtime, samplers, alarm).choose
    return {"sampler": choose, "join": joining(crew), "relays": reported(reports)}


def reported(reports: Mapping[WorkerId, RelayReport]) -> Function:
    """The command `relays`, with what relays say of themselves; no older than a second or two."""

    def relays(view: View, words: list[str]) -> Answer:
        answer = show_relays(view, words)
        known = [worker for worker in view.state.chain.order if worker in reports]
        rows = [_of_relay(worker, reports[worker]) for worker in known]
        columns = "relay slots slot_bytes leases receiving sending sent_bytes wire_bytes kept kept_bytes links"
        told = [table("as they say of themselves", columns, rows)] if rows else []
        return structs.replace(answer, tables=[*answer.tables, *told])

    return relays


def _of_relay(worker: WorkerId, report: RelayReport) -> list[Cell]:
    return [
        worker,
        ", ".join(f"{slot.version} {slot.state}" if slot.version else slot.state for slot in report.slots),
        report.slot_bytes,
        sum(slot.num_leases for slot in report.slots),
        _progress(report.receiving),
        _progress(report.sending),
        report.sent_bytes,
        report.wire_bytes,
        " ".join(map(str, report.kept)),
        report.kept_bytes,
        report.transport,
    ]


def _progress(progress: Progress | None) -> str:
    return f"{progress.version} {progress.num_bytes / progress.total_bytes:.0%}" if progress else ""


def joining(crew: Crew) -> Function:
    """The command `join`: the crew starts one more replica."""

    def join(view: View, words: list[str]) -> Answer:
        process = crew.join(words[0] if words else "")
        what = f"{process.name} is being started on {process.address}; it joins, pulls the newest weights and generates"
        return Answer(lines=[f"{what}: `replica {process.name}`; its log is logs/{process.name}.log"])

    return join
