"""Custom samplers from the core's side: when to ask, and what to do with a bad answer."""

from laminar.core import bounds, holds, versions
from laminar.core.actions import AskSampler, RaiseAlarm
from laminar.core.dispatch import gate_is_open, num_outstanding
from laminar.core.events import SamplerAnswered
from laminar.core.records import Group
from laminar.core.sampling import BufferView, GroupView, SamplerRequest, SamplerWord, problem
from laminar.core.training import why_no_batch_wanted
from laminar.core.turn import Turn


def view(turn: Turn) -> BufferView:
    """The buffer as a sampler sees it."""
    state = turn.state
    return BufferView(
        groups=tuple(_group_view(turn, state.groups[group]) for group in state.buffer),
        step=state.trainer.step + 1,
        version=turn.trainer_version,
    )


def _group_view(turn: Turn, group: Group) -> GroupView:
    members = [turn.state.trajectories[t] for t in group.trajectories]
    behavior = min(t.behavior_version for t in members if t.behavior_version is not None)
    return GroupView(
        id=group.id,
        prompt=group.prompt,
        age_s=turn.at - group.completed_at,
        behavior_version=behavior,
        staleness=versions.staleness(turn.state.branches, turn.trainer_version, behavior),
        rewards=tuple(t.reward for t in members),
        lengths=tuple(t.num_tokens for t in members),
    )


def why_not_asked(turn: Turn) -> str:
    """Why the custom sampler is not asked now; empty = it is, unless it waits for another group to complete."""
    state, num_groups = turn.state, turn.settings.batch_groups
    if not turn.settings.custom_sampler:
        return "there is none"
    if state.sampler_request:
        return f"it is asked for {state.sampler_request.num_groups} groups and has not answered"
    if state.sampler_answer:
        return f"it has chosen {len(state.sampler_answer)} groups"
    if holds.is_paused(state, "sample") or holds.shown(state, "sample"):
        return holds.why(state, "sample") or "a decision of the pass sample waits for a word"
    if reason := why_no_batch_wanted(turn):
        return reason
    if len(state.buffer) < num_groups:
        return f"{len(state.buffer)} of {num_groups} groups are complete and in the buffer"
    return bounds.refusal(turn, bounds.oldest_first(turn)[:num_groups])  # a group near the bound has to complete first


def ask(turn: Turn) -> None:
    """Ask the custom sampler when a batch is wanted and it has not been asked about this buffer."""
    state, settings = turn.state, turn.settings
    if not settings.custom_sampler or why_not_asked(turn):
        return
    if state.sampler_starved:
        if not _more_may_come(turn):  # what it waited for was dropped
            _refuse(turn, _nothing_chosen(turn))
        return
    state.num_sampler_requests += 1
    state.sampler_request = SamplerRequest(request=state.num_sampler_requests, num_groups=settings.batch_groups)
    turn.emit(
        AskSampler(
            cause=turn.cause,
            request=state.num_sampler_requests,
            num_groups=settings.batch_groups,
            view=view(turn),
            state=state.sampler_state,
        )
    )


def on_answered(turn: Turn, event: SamplerAnswered) -> None:
    """Use the choice, wait, or fall back as configured."""
    state = turn.state
    if state.sampler_request is None or state.sampler_request.request != event.request:
        return
    state.sampler_request = None
    state.sampler_state = event.state or state.sampler_state
    fault = _fault(turn, event)
    state.sampler_word = SamplerWord(request=event.request, at=turn.at, groups=event.groups, fault=fault)
    if fault:
        _refuse(turn, fault)
    elif event.groups:
        state.sampler_answer = event.groups
    else:
        _starve(turn)


def _fault(turn: Turn, event: SamplerAnswered) -> str:
    """Why its choice is not used; empty = it is."""
    if event.error:
        return event.error
    if event.elapsed_ms > turn.settings.sampler_budget_ms:
        return f"took {event.elapsed_ms:.1f} ms, allowed are {turn.settings.sampler_budget_ms:g} ms"
    if fault := problem(event.groups, turn.state.buffer, turn.settings.batch_groups):
        return fault
    fault = bounds.refusal(turn, event.groups) if event.groups else ""
    return f"chose a batch that cannot be trained: {fault}" if fault else ""


def _refuse(turn: Turn, fault: str) -> None:
    if turn.settings.on_sampler_error == "stop":
        turn.fail(f"the custom sampler {fault}")
        return
    turn.emit(RaiseAlarm(cause=turn.cause, name="sampler", text=f"the custom sampler {fault}; this batch is FIFO"))
    turn.state.sampler_answer = bounds.oldest_first(turn)[: turn.settings.batch_groups]


def _starve(turn: Turn) -> None:
    """It waits for something else. If nothing else can come, waiting would be for ever."""
    if not _more_may_come(turn):
        _refuse(turn, _nothing_chosen(turn))
        return
    turn.state.sampler_starved = True
    text = f"the custom sampler chose nothing from {len(turn.state.buffer)} complete groups"
    turn.emit(RaiseAlarm(cause=turn.cause, name="sampler-starved", text=text))


def _nothing_chosen(turn: Turn) -> str:
    return f"chose nothing although no other group can complete (the buffer holds {len(turn.state.buffer)})"


def _more_may_come(turn: Turn) -> bool:
    """Whether another group is in flight, or may begin under a version that some replica has or may still get."""
    state = turn.state
    if len(state.buffer) < num_outstanding(state):
        return True
    at_hand = [v for replica in state.replicas.values() for v in (replica.version, replica.target) if v is not None]
    to_come = [record.version for record in state.versions if record.ready or versions.is_coming(record)]
    return gate_is_open(turn) and any(bounds.admits(turn, version) for version in dict.fromkeys([*at_hand, *to_come]))
