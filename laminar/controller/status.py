"""What `/v1/status` says of the core: plain data for people and consoles."""

from collections.abc import Mapping

import msgspec

from laminar.core import amend, breakpoints, dispatch, health, holds
from laminar.core.decisions import in_words
from laminar.core.engine import Core
from laminar.core.records import RepackRecord, State
from laminar.core.turn import Turn
from laminar.ids import WorkerId
from laminar.wire import Progress, RelayReport, SlotReport


def status_of(core: Core, reports: Mapping[WorkerId, RelayReport]) -> dict[str, object]:
    """Where the run is, whether new groups begin, replicas and relays, lost replicas' trajectories, repacking, what an operator
    holds and has changed, the ledger.

    `reports`: what relays said of themselves last.
    """
    state = core.state
    return {
        "step": state.trainer.step,
        "steps": core.settings.steps,
        "buffer_groups": len(state.buffer),
        "new_groups": new_groups(core),
        "stalled_for_s": state.at - state.stall.since if state.stall.told else None,
        "replicas": _replicas(core),
        "relays": relays(state, reports),
        "failovers": msgspec.to_builtins(state.num_failovers),
        "repack": _repack(state.repack),
        "operator": operator(state),
        "ledger": msgspec.to_builtins(state.ledger),
    }


def operator(state: State) -> dict[str, object]:
    """What is held, and what was changed."""
    return {
        "holds": [holds.why(state, name) for name in state.holds],
        "held": {str(held.id): in_words(held.decision) for held in state.held.values()},
        "breakpoints": {
            str(each.id): {"at": breakpoints.in_text(each.where, each.conditions), "hits": each.num_hits}
            for each in state.breakpoints.values()
        },
        "settings": {key: state.amended[name] for name, key in amend.CHANGEABLE.items() if name in state.amended},
        "sampler": state.sampler or None,
        "stop_after_step": state.stop_after or None,
    }


def new_groups(core: Core) -> str:
    """Whether replicas that have room are given new groups, else why not."""
    state, settings = core.state, core.settings
    if state.stopping:
        return "no more: the run is stopping"
    if state.storage_failure:
        return f"held back: {state.storage_failure}"
    outstanding = dispatch.num_outstanding(state)
    texts = {
        "": "begin wherever a replica has room and its refresh policy lets it",
        "steps": "no more: what is in flight and buffered is enough for the remaining steps",
        "ready_groups_max": f"held back by buffer.max_ready_groups: {len(state.buffer)} of {settings.ready_groups_max} wait",
        "buffer_groups_max": f"held back by buffer.max_groups: {outstanding} of {settings.buffer_groups_max} are in flight"
        " or buffered",
    }
    return texts[dispatch.held_back_by(Turn(state, settings, core.story))]


def _replicas(core: Core) -> dict[str, dict[str, object]]:
    """Every replica that is there or expected back, and those that were given up."""
    found: dict[str, dict[str, object]] = {}
    for worker, status in health.overview(Turn(core.state, core.settings, core.story)).items():
        replica, restart = core.state.replicas.get(worker), core.state.restarts.get(worker)
        found[worker] = {
            "state": status.health,
            "reason": status.reason,
            "version": str(replica.version) if replica and replica.version else None,
            "generating": replica.num_generating if replica else 0,
            "restarts": restart.num if restart else 0,
        }
    return found


def relays(state: State, reports: Mapping[WorkerId, RelayReport]) -> dict[str, object]:
    """The chain, the versions that each relay holds completely, and what it says of itself."""
    held = {relay.id: [str(version) for version in relay.held] for relay in state.relays.values()}
    links = {worker: _link(reports[worker]) for worker in state.relays if worker in reports}
    return {**msgspec.to_builtins(state.chain), "held": held, "links": links}


def _link(report: RelayReport) -> dict[str, object]:
    return {
        "transport": report.transport,
        "sent_bytes": report.sent_bytes,
        "wire_bytes": report.wire_bytes,
        "receiving": _progress(report.receiving),
        "sending": _progress(report.sending),
        "kept_as_deltas": [str(version) for version in report.kept],
        "kept_bytes": report.kept_bytes,
        "slots": [_slot(slot) for slot in report.slots],
        "slot_bytes": report.slot_bytes,
    }


def _slot(slot: SlotReport) -> dict[str, object]:
    return {
        "state": slot.state,
        "version": str(slot.version) if slot.version else None,
        "leases": slot.num_leases,
    }


def _progress(progress: Progress | None) -> dict[str, object] | None:
    if progress is None:
        return None
    return {"version": str(progress.version), "bytes": progress.num_bytes, "of": progress.total_bytes}


def _repack(record: RepackRecord) -> dict[str, object]:
    """All checks so far in numbers; why each replica was a source or not in the last, and in the last that moved anything."""
    return {
        "checked_at": record.checked_at,
        "reasons": dict(record.reasons),
        "moved_at": record.moved_at,
        "moved_reasons": dict(record.moved_reasons),
        "checks": record.num_checks,
        "emptied": record.num_released,
        "moves": record.num_moves,
        "moved_tokens": record.num_moved_tokens,
    }
