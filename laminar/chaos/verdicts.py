"""What must hold of a run, whatever struck it: each a name and the findings against it, of which there should be none."""

from collections import Counter
from collections.abc import Callable

from laminar.chaos.evidence import FINDINGS_MAX, Evidence, Row, is_closed
from laminar.chaos.journal import Strike
from laminar.core import events
from laminar.core.records import GroupState
from laminar.ids import GroupId, format_id

PULLED_MARGIN_S = 0.5  # a pull that had begun before the bytes were flipped may be told of so much later


def ledger_closed(evidence: Evidence, strikes: list[Strike]) -> list[str]:
    """The ledger closes after every event, and the core's other invariants hold."""
    return [*evidence.findings, *([] if is_closed(evidence.core) else ["the ledger is not closed at the end"])]


def books_match_rows(evidence: Evidence, strikes: list[Strike]) -> list[str]:
    """What was recorded is what the log gives."""
    found = []
    rows, recorded = evidence.tables.rows, evidence.recorded
    for trajectory, expected in recorded.items():
        row = rows.get(trajectory)
        if row != expected:
            wrong = "is missing" if row is None else f"says {_difference(row, expected)}"
            found.append(f"the row of trajectory {format_id(trajectory)} {wrong}")
    return found + [
        f"trajectory {format_id(t)} has a row, but the log does not know it" for t in rows if t not in recorded
    ]


def _difference(row: Row, expected: Row) -> str:
    pairs = [
        (name, a, b) for name, a, b in zip(Row._fields, row, expected, strict=True) if a != b
    ]  # fmt: skip
    return ", ".join(f"{name} {a!r} instead of {b!r}" for name, a, b in pairs)


def trained_once(evidence: Evidence, strikes: list[Strike]) -> list[str]:
    """No group is trained twice on the weights that survive; a step that is done again is done with the same groups."""
    found, first = [], dict[int, tuple[GroupId, ...]]()
    for step in evidence.trained:
        if first.setdefault(step.step, step.groups) != step.groups:
            found.append(f"step {step.step}, attempt {step.attempt}: other groups than at first")
    counts = Counter(group for groups in first.values() for group in groups)
    found += [f"group {format_id(group)} was trained in {num} steps" for group, num in counts.items() if num > 1]
    rows = [row for row in evidence.tables.rows.values() if row.step and not row.dropped]
    steps: dict[GroupId, set[int]] = {}
    for row in rows:
        steps.setdefault(row.group, set()).add(row.step or 0)
    found += [f"group {format_id(g)} has rows of steps {sorted(s)}" for g, s in steps.items() if len(s) > 1]
    missing = [step for step in range(1, max(first, default=0) + 1) if step not in first]
    begin = min(first, default=1)
    return found + [f"step {step} was left out" for step in missing if step > begin]


def prompts_once(evidence: Evidence, strikes: list[Strike]) -> list[str]:
    """No prompt is drawn more often than the epochs that have begun."""
    epochs = evidence.core.state.prompts.epoch + 1
    counts = Counter(evidence.prompts.values())
    return [f"prompt {p} was drawn {num} times in {epochs} epochs" for p, num in counts.items() if num > epochs]


def accounted(evidence: Evidence, strikes: list[Strike]) -> list[str]:
    """Every trajectory that was drawn ended trained, dropped for a reason, or is still open."""
    state, found = evidence.core.state, []
    for trajectory, group in evidence.drawn.items():
        row = evidence.tables.rows.get(trajectory)
        open_here = trajectory in state.trajectories and not (row and row.dropped)
        if not open_here and (row is None or not (row.dropped or row.step)):
            found.append(f"trajectory {format_id(trajectory)} of group {format_id(group)} ended nowhere")
    rows = evidence.tables.rows.values()
    leased = {t for t, record in state.trajectories.items() if state.groups[record.group].state == GroupState.LEASED}
    trained = [
        row for row in rows if row.step and not row.dropped and row.id in evidence.drawn and row.id not in leased
    ]
    account = state.ledger
    committed = (account.trajectories.committed, account.tokens.committed)
    counted = (len(trained), sum(row.num_tokens for row in trained))
    if not evidence.tables.data_state and counted != committed:
        found.append(
            f"the rows of committed steps are {counted[0]} trajectories with {counted[1]} tokens, the books say "
            f"{committed[0]} with {committed[1]}"
        )
    return found


def one_version(evidence: Evidence, strikes: list[Strike]) -> list[str]:
    """The siblings of a group, and so each trajectory, are of one weight version, whose digest is the published one."""
    found, versions = [], dict[GroupId, set[str | None]]()
    digests = {_name(step, branch): digest for step, branch, digest in evidence.tables.versions}
    for row in evidence.tables.rows.values():
        if row.dropped or not row.step:
            continue
        versions.setdefault(row.group, set()).add(row.behavior_version)
        known = digests.get(row.behavior_version or "")
        if known is None:
            found.append(f"trajectory {format_id(row.id)} is of {row.behavior_version}, which was never published")
        elif row.digest != known:
            found.append(f"trajectory {format_id(row.id)} has digest {row.digest}, {row.behavior_version} has {known}")
    if evidence.settings.group_versions == "regenerate":
        found += [f"group {format_id(g)} is of {sorted(map(str, v))}" for g, v in versions.items() if len(v) > 1]
    return found


def _name(step: int, branch: int) -> str:
    return f"v{step}" if branch == 0 else f"v{step}.b{branch}"


def published_once(evidence: Evidence, strikes: list[Strike]) -> list[str]:
    """No version is held with two digests, and none is used with another than it was published with."""
    found, digests = [], dict[str, str]()
    for event in evidence.tables.events:
        if isinstance(event, events.VersionReady | events.VersionHeld | events.ReplicaRefreshed):
            known = digests.setdefault(str(event.version), event.digest)
            if known != event.digest:
                found.append(f"event {event.seq}: {event.version} with digest {event.digest}, not {known}")
    return found


def never_corrupt(evidence: Evidence, strikes: list[Strike]) -> list[str]:
    """A version whose bytes were flipped in a relay is used by no replica of its host from then on."""
    hosts, found = dict[str, str](), []
    corrupt = [(s.target, str(s.facts["version"]), s.at) for s in strikes if s.kind == "corrupt" and s.facts]
    for event in evidence.tables.events:
        if isinstance(event, events.ReplicaJoined | events.RelayJoined):
            hosts[event.worker] = event.host
        elif isinstance(event, events.ReplicaRefreshed):
            for relay, version, at in corrupt:
                pulled_at = event.at - event.wait_s
                here = hosts.get(event.worker) == hosts.get(relay)
                if here and str(event.version) == version and pulled_at > at + PULLED_MARGIN_S:
                    found.append(f"event {event.seq}: {event.worker} took {version}, which was corrupted in {relay}")
    return found


def ended_well(evidence: Evidence, strikes: list[Strike]) -> list[str]:
    """The run ended as it should, and its controller broke nowhere."""
    dumps = sorted((evidence.run / "logs").glob("core-dump-*"))
    found = [f"the controller broke: {path}" for path in dumps]
    state = evidence.core.state
    if state.finished and not state.ok:
        found.append(f"the run failed: {state.finished}")
    elif evidence.tables.boots[-1][3] is None and state.finished:
        found.append("the last controller ended without a word")
    return found


CHECKS: dict[str, Callable[[Evidence, list[Strike]], list[str]]] = {
    "ledger closed after every event": ledger_closed,
    "rows as the log gives them": books_match_rows,
    "no group trained twice": trained_once,
    "no prompt drawn twice": prompts_once,
    "every trajectory accounted for": accounted,
    "one version per trajectory": one_version,
    "one digest per version": published_once,
    "no corrupt version used": never_corrupt,
    "ended well": ended_well,
}


def judge(evidence: Evidence, strikes: list[Strike]) -> dict[str, list[str]]:
    """Findings by check, the first few of each."""
    found = {name: check(evidence, strikes) for name, check in CHECKS.items()}
    return {name: _first(findings) for name, findings in found.items()}


def _first(findings: list[str]) -> list[str]:
    rest = len(findings) - FINDINGS_MAX
    return findings if rest <= 0 else [*findings[:FINDINGS_MAX], f"and {rest} more"]
