"""Change a run: settings, replicas, the sampler, a checkpoint, its end. Each is an event in the log (`laminar.core.amend`)."""

from collections import Counter

from laminar.console import subjects
from laminar.console.answers import Answer, Cell, Change, table
from laminar.console.language import Command, UsageError
from laminar.console.subjects import nearest
from laminar.console.view import View
from laminar.core import amend, events, fleet, tuning
from laminar.core.operator_records import Value
from laminar.ids import WorkerId

KEYS = {key: name for name, key in amend.CHANGEABLE.items()}
"""As users know them -> settings of the core."""
OF_REPLICAS = tuning.KEYS
"""Keys that are changed of every replica, or of one that is named."""
SWITCH = "repack.enabled"


def show_settings(view: View, words: list[str]) -> Answer:
    """What can be changed, as it is now."""
    rows: list[list[Cell]] = [
        [key, _as_written(getattr(view.settings, name)), "changed by an operator" if name in view.state.amended else ""]
        for key, name in KEYS.items()
        if all(word in key for word in words)
    ]
    rows += [[key, _of_replicas(view, field), ""] for key, field in OF_REPLICAS.items() if all(w in key for w in words)]
    own: list[list[Cell]] = [
        [str(worker) or "every replica", each.flush_interval_s or None, each.num_requests_max or None]
        for worker, each in view.state.replica_settings.items()
    ]
    tables = [table("", "key value note", rows)] if rows else []
    tables += [table("changed of replicas", "replica flush_interval_s num_requests_max", own)] if own else []
    return Answer(tables=tables, lines=["`set KEY=VALUE` changes one"] if rows else [f"no key has {' '.join(words)}"])


def _as_written(value: Value) -> Cell:
    return "none" if value is None else value


def _of_replicas(view: View, field: str) -> Cell:
    everybody = view.state.replica_settings.get(tuning.EVERYBODY)
    return (getattr(everybody, field) if everybody else 0) or "as configured"


# ---- set ---------------------------------------------------------------------------------------------------


def change(view: View, words: list[str]) -> Change:
    """`set KEY=VALUE …`, of replicas `set KEY=VALUE [REPLICA]`."""
    assignments = [word for word in words if "=" in word]
    replicas = [word for word in words if "=" not in word]
    if twice := [word for word, num in Counter(_parted(word)[0] for word in assignments).items() if num > 1]:
        raise UsageError(f"{twice[0]} is given twice")
    if not assignments:
        raise UsageError(f"{words[0]!r} is no KEY=VALUE; `settings` lists what can be changed")
    of_replicas = [word for word in assignments if word.partition("=")[0] in OF_REPLICAS]
    if not of_replicas and replicas:
        raise UsageError(f"{replicas[0]!r}: only {' and '.join(OF_REPLICAS)} can be set of one replica")
    if of_replicas and len(of_replicas) < len(assignments):
        raise UsageError("what is set of replicas, and settings of the run, are two commands")
    return _of_some_replicas(view, of_replicas, replicas) if of_replicas else _of_the_run(view, assignments)


def _of_the_run(view: View, assignments: list[str]) -> Change:
    changes: dict[str, Value] = dict(_setting(view, *_parted(word)) for word in assignments)
    if refusal := amend.why_not_changed(view.turn, changes):
        raise UsageError(_in_keys(refusal))
    then = "from the next decision on; what has begun under the old value stays as it was decided"
    return Change(events=[events.SettingsChanged(changes=changes)], lines=[then])


def _parted(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value


def _setting(view: View, key: str, text: str) -> tuple[str, Value]:
    """The core's name and value of what a user writes. Raises UsageError."""
    if key == SWITCH:
        if text.lower() != "false":
            raise UsageError(f"{key}={text}: write repack.interval_s=5, or another period, to switch it on")
        return "repack_interval_s", 0.0
    name = KEYS.get(key, key)
    if name not in amend.CHANGEABLE:
        near = nearest(key, [*KEYS, *OF_REPLICAS])
        raise UsageError(f"{key} cannot be changed while a run goes on{near}; `settings` lists what can")
    if key == "buffer.max_staleness" and text == "-1":
        return name, None
    if key == "buffer.max_groups" and text == "0":
        return name, 3 * view.settings.batch_groups
    try:
        return name, amend.parse(name, text)
    except ValueError as error:
        raise UsageError(_in_keys(str(error))) from None


def _in_keys(text: str) -> str:
    """A refusal of the core, with settings named as users know them."""
    for name, key in sorted(amend.CHANGEABLE.items(), key=lambda item: -len(item[0])):
        text = text.replace(f"{name} =", f"{key} =")
    return text


def _of_some_replicas(view: View, assignments: list[str], names: list[str]) -> Change:
    values = {OF_REPLICAS[key]: _number(key, text) for key, text in map(_parted, assignments)}
    workers = [subjects.replica(view, name).id for name in names] or [tuning.EVERYBODY]
    number = int(values["num_requests_max"]) if "num_requests_max" in values else None
    changes = [
        events.ReplicaSettingsChanged(
            worker=worker, flush_interval_s=values.get("flush_interval_s"), num_requests_max=number
        )
        for worker in workers
    ]
    for each in changes:
        if refusal := tuning.why_not_reconfigured(view.turn, each):
            raise UsageError(refusal)
    whom = ", ".join(map(str, workers)) if names else "every replica, also those that join later"
    then = "a replica over a lower limit gets nothing new until enough of what it has is done; 0 = as it was started"
    return Change(events=list(changes), lines=[f"{', '.join(assignments)} for {whom}", *([then] if number else [])])


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
        if key == "rollout.max_concurrent":
            value = int(text)
    except ValueError:
        kind = "a whole number" if key == "rollout.max_concurrent" else "a number of seconds"
        raise UsageError(f"{key}={text}: {kind} is expected") from None
    return value


# ---- the sampler -------------------------------------------------------------------------------------------


def sampler(view: View, words: list[str]) -> Answer | Change:
    """Which one chooses; `sampler REFERENCE`: that one from now on. Whoever drives the core loads it before."""
    if words:
        what = "batches are taken first in, first out" if words[0] == amend.FIFO else f"{words[0]} chooses the batches"
        return Change(events=[events.SamplerChanged(reference=words[0])], lines=[f"{what} from now on"])
    chosen, is_custom = view.state.sampler, view.settings.custom_sampler
    by = f"{chosen}, chosen by an operator" if chosen else f"that of the configuration ({amend.SAMPLER})"
    facts: dict[str, Cell] = {"sampler": by if is_custom else "fifo: batches are taken first in, first out"}
    if is_custom and (word := view.state.sampler_word):
        facts["last_word"] = f"it {word.fault}" if word.fault else f"it chose {len(word.groups)} groups"
    return Answer(facts=facts)


# ---- replicas, checkpoints, the end ------------------------------------------------------------------------


def drain(view: View, words: list[str]) -> Change:
    """Take replicas out: they finish what they have, and leave."""
    workers = [subjects.replica(view, word).id for word in words]
    for worker in workers:
        if refusal := fleet.why_not_drained(view.state, worker):
            raise UsageError(refusal)
    return Change(
        events=[events.DrainRequested(worker=worker) for worker in workers], lines=[_leaves(view, w) for w in workers]
    )


def _leaves(view: View, worker: WorkerId) -> str:
    left = view.state.replicas[worker].num_generating
    return f"{worker} begins nothing more, and leaves when its {left} trajectories are done: `why {worker}`"


def checkpoint(view: View, words: list[str]) -> Change:
    """Save a checkpoint now, or after the running step."""
    if refusal := amend.why_no_checkpoint(view.state):
        raise UsageError(f"no checkpoint is made: {refusal}")
    running = view.state.trainer.running
    when = f"after step {running}, which is running" if running else f"of step {view.state.trainer.step}, at once"
    return Change(events=[events.CheckpointRequested()], lines=[f"a checkpoint is made {when}"])


def stop(view: View, words: list[str]) -> Change:
    """`stop`, `stop after STEP`, `stop never`."""
    match words:
        case []:
            what = "the step under way is finished, a checkpoint is saved, and the run ends; it can be resumed"
            return Change(events=[events.StopRequested(reason="stopped by an operator")], lines=[what])
        case ["after", step] if step.isdecimal() and int(step):
            number, what = int(step), f"the run ends when step {step} is done, with a checkpoint"
        case ["never"]:
            number, what = 0, f"the run goes on to step {view.settings.steps}"
        case _:
            raise UsageError(f"{' '.join(words)!r}: write `stop`, `stop after 12` or `stop never`")
    if refusal := amend.why_not_stopping_after(view.turn, number):
        raise UsageError(refusal)
    return Change(events=[events.StopAfterStep(step=number)], lines=[what])


COMMANDS = (
    Command(
        name="settings",
        part="Look",
        usage="settings [WORD …]",
        summary="what `set` can change, as it is now",
        function=show_settings,
        arguments=(0, 3),
        examples=(("settings", "all"), ("settings repack", "those with `repack` in their name")),
    ),
    Command(
        name="set",
        part="Change",
        usage="set KEY=VALUE … | set KEY=VALUE [REPLICA …]",
        summary="change bounds, thresholds, policies, concurrency, flush intervals",
        function=change,
        arguments=(1, 12),
        takes="SETTING, SETTING REPLICA",
        examples=(
            ("set buffer.max_groups=40", "let 40 groups live at once"),
            ("set repack.interval_s=2 repack.policy=parts", "two at once: both, or none"),
            ("set buffer.max_staleness=-1", "no bound"),
            ("set rollout.max_concurrent=64 r3", "rollout-3 gets at most 64 requests at once"),
            ("set rollout.flush_interval_s=1", "every replica flushes its tokens once a second"),
        ),
        details="Keys are those of the configuration file. What is changed stays so, also when the controller is replaced, or the "
        "run is resumed from a checkpoint: then KEY=VALUE after --resume wins over it.",
    ),
    Command(
        name="sampler",
        part="Change",
        usage="sampler [fifo | PKG.MOD:CLASS | FILE.py:CLASS]",
        summary="which sampler chooses the batches; or let another one do so from now on",
        function=sampler,
        arguments=(0, 1),
        takes="fifo",
        examples=(
            ("sampler", "which one chooses, and what it said last"),
            ("sampler mine.py:MySampler", "another one; a file is read as it is now"),
            ("sampler fifo", "the built-in one"),
        ),
        details="A live run loads it in the background: nothing changes if that fails. A path is taken from where you are, if "
        "there is such a file, else from where the controller was started.",
    ),
    Command(
        name="drain",
        part="Change",
        usage="drain REPLICA …",
        summary="take replicas out: they finish what they have, and leave",
        function=drain,
        arguments=(1, 16),
        takes="REPLICA",
        examples=(("drain r3", "rollout-3; the last one that admits groups is kept"),),
    ),
    Command(
        name="join",
        part="Change",
        usage="join [HOST]",
        summary="start one more replica",
        arguments=(0, 1),
        only=("live", "sim"),
        elsewhere="it has the replicas that it had",
        examples=(
            ("join", "on the first rollout host that has room"),
            ("join gpu02", "on that host of the hosts file"),
        ),
    ),
    Command(
        name="checkpoint",
        part="Change",
        usage="checkpoint [now]",
        summary="save a checkpoint now, or after the running step",
        function=checkpoint,
        arguments=(0, 1),
        option="now",
        examples=(("checkpoint", "of the step that is done, or of the one that runs"),),
    ),
    Command(
        name="stop",
        part="Change",
        usage="stop [after STEP | never]",
        summary="end the run: finish the step, save, leave nothing behind",
        function=stop,
        arguments=(0, 2),
        takes="after never",
        examples=(
            ("stop", "after the step under way"),
            ("stop after 40", "when step 40 is done"),
            ("stop never", "take that back"),
        ),
    ),
    Command(
        name="whatif",
        part="Try",
        usage="whatif CHANGE [for SECONDS | for N steps]",
        summary="carry a change out on a copy, simulate both forward, and compare",
        arguments=(1, 16),
        elsewhere="attach by the run's directory, whose log it is made of",
        takes="set drain join sampler, SETTING REPLICA",
        examples=(
            ("whatif set repack.interval_s=2 for 600", "the next ten minutes with more frequent checks"),
            ("whatif set rollout.refresh_policy=continuous buffer.max_ready_groups=64 for 3 steps", "another policy"),
            ("whatif drain r3", "one replica less"),
            ("whatif join", "one more"),
            ("whatif sampler mine.py:MySampler for 3 steps", "another sampler; every simulated reward is 1"),
        ),
        details="CHANGE is any command of `Change`. Both copies begin in the state of now. Of a live or recorded run they go on "
        "with the rates fitted from its log and without further faults, and what the log has of that time is beside them. "
        "The run is never changed. A whole run, as if it had begun otherwise: `python -m laminar.replay RUN --whatif KEY=VALUE`.",
    ),
)
