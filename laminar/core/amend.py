"""What an operator changes while a run goes on: settings, the sampler, a checkpoint, an end. (Of replicas: `laminar.core.tuning`.)

Every change is an event, checked before anything follows it: what cannot be is refused with the reason, told, and nothing is
changed. What is changed is part of the state (`State.amended` …), so a snapshot, a take-over and a replay go on with it, and it is
in every checkpoint: a resume goes on with it too, but for what it names anew. `Core.settings` is always what applies now.

A setting may change only if its meaning does not reach into what has begun: not the seed, the sizes of groups and batches, or how
versions mix in a group. What a change has to set right is in `_AFTER`; what was decided under the old value stays decided: a leased
batch is trained, a move under way ends, a local batch that has begun goes on (but is not filled beyond the new size).
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from laminar.core import (
    checkpointing,
    evaluation,
    health,
    limits,
    moves,
    refresh,
    resume,
    stall,
    story,
    stragglers,
    tuning,
    versions,
)
from laminar.core.actions import RaiseAlarm, UseSampler
from laminar.core.events import CheckpointRequested, SamplerChanged, SettingsChanged, StopAfterStep
from laminar.core.operator_records import Value
from laminar.core.records import State
from laminar.core.settings import Settings
from laminar.core.turn import Turn

CHANGEABLE: dict[str, str] = {
    "steps": "run.steps",
    "buffer_groups_max": "buffer.max_groups",
    "ready_groups_max": "buffer.max_ready_groups",
    "max_staleness": "buffer.max_staleness",
    "on_stale": "buffer.on_stale",
    "on_incomplete": "buffer.on_incomplete",
    "min_group_size": "buffer.min_group_size",
    "stragglers": "buffer.stragglers",
    "straggler_factor": "buffer.straggler_factor",
    "on_sampler_error": "buffer.on_sampler_error",
    "sampler_budget_ms": "buffer.sampler_budget_ms",
    "num_retries": "rollout.num_retries",
    "local_batch_groups": "rollout.local_batch_groups",
    "refresh_policy": "rollout.refresh_policy",
    "draining_share": "rollout.draining_share",
    "staleness_budget": "rollout.staleness_budget",
    "await_publication_s": "rollout.await_publication_s",
    "progress_timeout_s": "rollout.progress_timeout_s",
    "restarts_max": "rollout.restarts",
    "trainer_restarts_max": "trainer.restarts",
    "relay_restarts_max": "relay.restarts",
    "checkpoint_every": "trainer.checkpoint_every",
    "repack_interval_s": "repack.interval_s",
    "repack_policy": "repack.policy",
    "repack_kv_share": "repack.kv_share",
    "repack_requests_max": "repack.requests_max",
    "stall_after_s": "controller.stall_after_s",
}
"""Setting -> the key of the configuration that it is from. `max_staleness` none, and `repack_interval_s` 0, are -1 and
`repack.enabled = false` there; `local_batch_groups` is never 0 here."""

FIFO = "fifo"
SAMPLER = "buffer.sampler"
ALL_KEYS = (*CHANGEABLE.values(), "repack.enabled", SAMPLER, *tuning.KEYS)
"""Of the configuration, in whose place something of an operator's may be."""
_KINDS = {field.name: field.type for field in msgspec.structs.fields(Settings)}


def amended(settings: Settings, state: State) -> Settings:
    """What applies now: what the run was configured with, and what an operator has changed since."""
    return msgspec.structs.replace(settings, **state.amended)


def in_words(state: State) -> list[str]:
    """All that an operator has changed, by the keys of the configuration: ``buffer.max_groups = 40``."""
    found = [f"{CHANGEABLE[name]} = {value}" for name, value in state.amended.items() if name in CHANGEABLE]
    found += [f"{SAMPLER} = {state.sampler}"] if state.sampler else []
    for worker, changed in state.replica_settings.items():
        whose = f" of {worker}" if worker != tuning.EVERYBODY else ""
        found += [
            f"{key} = {getattr(changed, name):g}{whose}" for key, name in tuning.KEYS.items() if getattr(changed, name)
        ]
    return found


def overruled(data_state: bytes, keys: Iterable[str]) -> bytes:
    """What a checkpoint carried, without what an operator had changed of these keys: whoever resumes has named them anew.

    Raises msgspec.DecodeError for anything but the state of a checkpoint.
    """
    saved, named = resume.decode(data_state), list(keys)
    gone = {name: None for name, key in CHANGEABLE.items() if key in named}
    if "repack.enabled" in named:
        gone["repack_interval_s"] = None
    if SAMPLER in named and saved.sampler:
        gone["custom_sampler"] = None
        saved = msgspec.structs.replace(saved, sampler="", sampler_state=b"")
    amended = {name: value for name, value in saved.amended.items() if name not in gone}
    own = {name: 0 for key, name in tuning.KEYS.items() if key in named}
    replicas = {worker: msgspec.structs.replace(each, **own) for worker, each in saved.replica_settings.items()}
    return msgspec.msgpack.encode(msgspec.structs.replace(saved, amended=amended, replica_settings=replicas))


# ---- settings ----------------------------------------------------------------------------------------------


def parse(name: str, text: str) -> Value:
    """The value of a setting as a console takes it; ``none`` = none. Raises ValueError with what would do."""
    if name not in CHANGEABLE:
        raise ValueError(_not_changeable(name))
    return _convert(name, None if text.lower() in ("none", "null") else text, strict=False)


def _convert(name: str, value: Value, *, strict: bool = True) -> Value:
    try:
        return msgspec.convert(value, _KINDS[name], strict=strict)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise ValueError(f"{name} = {value!r}: {str(error)[:1].lower()}{str(error)[1:]}") from None


def _not_changeable(name: str) -> str:
    if name in _KINDS:
        return f"{name} cannot change while a run goes on; these can: {', '.join(CHANGEABLE)}"
    return f"there is no setting {name!r}; these can change: {', '.join(CHANGEABLE)}"


def why_not_changed(turn: Turn, changes: dict[str, Value]) -> str:
    """Why settings do not become so; empty = they do."""
    try:
        new = _with(turn.settings, changes)
    except ValueError as error:
        return str(error)
    if problems := limits.problems(new):
        return "; ".join(problems)
    return (
        _why_not_steps(turn.state, new)
        or _why_not_bound(turn, new)
        or tuning.why_too_slow(turn.state, new.progress_timeout_s)
    )


def _with(settings: Settings, changes: dict[str, Value]) -> Settings:
    """Raises ValueError for a change that is none."""
    if not changes:
        raise ValueError("no setting is named")
    for name in changes:
        if name not in CHANGEABLE:
            raise ValueError(_not_changeable(name))
    return _with_derived(settings, {name: _convert(name, value) for name, value in changes.items()})


def _with_derived(settings: Settings, values: dict[str, Any]) -> Settings:
    """A limit that is larger than the buffer has to stay so: one outage may drop all that is in flight."""
    new = msgspec.structs.replace(settings, **values)
    drops = max(new.drops_without_progress_max, new.buffer_groups_max)
    return msgspec.structs.replace(new, drops_without_progress_max=drops)


def _why_not_steps(state: State, new: Settings) -> str:
    begun = max([state.trainer.step, *state.steps])
    return f"steps = {new.steps}: step {begun} has begun" if new.steps < begun else ""


def _why_not_bound(turn: Turn, new: Settings) -> str:
    """A bound that nothing which replicas can pull would meet, and that no publication to come would mend."""
    state, bound = turn.state, new.max_staleness
    readable = versions.newest(state)
    if bound is None or bound == turn.settings.max_staleness or readable is None:
        return ""
    age = versions.staleness(state.branches, turn.trainer_version, readable.version)
    is_to_come = bool(state.trainer.running) or not state.trainer.ready or versions.is_coming(state.versions[-1])
    if age <= bound or is_to_come:
        return ""
    return f"max_staleness = {bound}: the newest weights that replicas can pull, {readable.version}, are {age} steps behind"


def on_settings_changed(turn: Turn, event: SettingsChanged) -> None:
    """All of them, or none."""
    if refusal := why_not_changed(turn, event.changes):
        turn.refuse("settings", refusal)
        return
    old, turn.settings = turn.settings, _with(turn.settings, event.changes)
    names = [*event.changes, "drops_without_progress_max"]
    changed = {
        name: getattr(turn.settings, name) for name in names if getattr(turn.settings, name) != getattr(old, name)
    }
    turn.state.amended |= changed
    for name in changed:
        if name in _AFTER:
            _AFTER[name](turn)
    turn.look_again()
    told = [
        f"{CHANGEABLE[name]} {getattr(old, name)} → {value}" for name, value in changed.items() if name in CHANGEABLE
    ]
    text = ", ".join(told) or "they were so already"
    turn.emit(RaiseAlarm(cause=turn.cause, name="settings-changed", text=text))
    turn.tell(text, story.SETTINGS)


def _after_steps(turn: Turn) -> None:
    """An evaluation of what was to be the last weights says nothing of the last weights that come."""
    evaluation.supersede_before(turn, turn.settings.steps)


def _after_bound(turn: Turn) -> None:
    turn.state.may_have_aged = True  # `wait`: what can no longer be trained in time leaves


def _after_local_batch(turn: Turn) -> None:
    for replica in turn.state.replicas.values():
        replica.admit_left = min(replica.admit_left, turn.settings.local_batch_groups)


_AFTER: dict[str, Callable[[Turn], None]] = {
    "steps": _after_steps,
    "max_staleness": _after_bound,
    "on_stale": _after_bound,
    "local_batch_groups": _after_local_batch,
    "refresh_policy": refresh.policy_changed,
    "draining_share": refresh.policy_changed,
    "staleness_budget": refresh.policy_changed,
    "repack_interval_s": moves.interval_changed,
    "stragglers": stragglers.rules_changed,
    "straggler_factor": stragglers.rules_changed,
    "min_group_size": stragglers.rules_changed,
    "progress_timeout_s": health.timeout_changed,
    "stall_after_s": stall.begin,
}


# ---- checkpoints and the end ---------------------------------------------------------------------------------


def why_no_checkpoint(state: State) -> str:
    """Why a checkpoint that is asked for is not made; empty = it is, at once or after the running step."""
    trainer = state.trainer
    if state.stopping or state.finished:
        return "the run is ending, and saves its last checkpoint anyway"
    newest = max(trainer.checkpoint, trainer.saving, 0)
    if trainer.ready and not trainer.running and newest >= trainer.step:
        return f"there is nothing to save: step {trainer.step} is " + (
            "being saved" if trainer.saving >= 0 else "saved"
        )
    return ""


def on_checkpoint_requested(turn: Turn, event: CheckpointRequested) -> None:
    """After the running step, or at once; while another is being written, or the disk takes nothing, after that."""
    if refusal := why_no_checkpoint(turn.state):
        turn.refuse("checkpoint", refusal)
        return
    turn.state.trainer.save_wanted = True
    checkpointing.save_wanted(turn)


def why_not_stopping_after(turn: Turn, step: int) -> str:
    """Why the run does not end after this step; empty = it does. 0 = no step is the last any more."""
    state, last = turn.state, turn.settings.steps
    if state.stopping or state.finished:
        return "the run is ending already"
    if not step:
        return "" if state.stop_after else "the run was not to stop after any step"
    if step <= state.trainer.step:
        return f"step {step} is over; the next to end is {state.trainer.step + 1}"
    return f"the run ends with step {last} anyway" if step >= last else ""


def on_stop_after_step(turn: Turn, event: StopAfterStep) -> None:
    """The run stops as if it were told to when that step ends."""
    if refusal := why_not_stopping_after(turn, event.step):
        turn.refuse("stop", refusal)
        return
    turn.state.stop_after = event.step
    turn.look_again()
    turn.tell(
        f"the run is to stop after step {event.step}" if event.step else "the run goes on to its end", story.SETTINGS
    )


# ---- the sampler ---------------------------------------------------------------------------------------------


def on_sampler_changed(turn: Turn, event: SamplerChanged) -> None:
    """The next batch is chosen by this one, from a fresh start. The shell has loaded it: what cannot be loaded is no event."""
    state = turn.state
    state.sampler = event.reference
    state.sampler_request, state.sampler_answer, state.sampler_starved = None, [], False
    state.sampler_state, state.sampler_word = b"", None
    is_custom = event.reference != FIFO
    state.amended["custom_sampler"] = is_custom
    turn.settings = msgspec.structs.replace(turn.settings, custom_sampler=is_custom)
    turn.look_again()
    turn.emit(UseSampler(cause=turn.cause, reference=event.reference))
    turn.emit(RaiseAlarm(cause=turn.cause, name="sampler-changed", text=f"batches are chosen by {event.reference}"))
    turn.tell(f"the sampler is {event.reference}", story.SETTINGS)
