"""Greedy accuracy on held-out prompts before the first and after the last step, by one replica each."""

from laminar.core import fleet, health, story, versions
from laminar.core.actions import RaiseAlarm, RunEvaluation
from laminar.core.events import EvaluationFailed, EvaluationFinished
from laminar.core.records import Evaluation, State
from laminar.core.turn import Turn

FAILURES_MAX = 3  # an evaluation that failed three times must not hold up the end of the run


def plan(turn: Turn) -> None:
    """Note which evaluation is due, and give it to a replica that holds its version."""
    state = turn.state
    if not turn.settings.evaluate or state.stopping:
        return
    newest = versions.newest(state)
    if newest is None:
        return
    names = {evaluation.name for evaluation in state.evaluations}
    if "before" not in names:
        _add(turn, "before")
    is_undone = newest.version.branch != turn.trainer_version.branch
    if "after" not in names and newest.version.step >= turn.settings.steps and not is_undone:
        _add(turn, "after")
    for evaluation in state.evaluations:
        if evaluation.worker is None and not evaluation.done:
            _assign(turn, evaluation)


def _add(turn: Turn, name: str) -> None:
    newest = versions.newest(turn.state)
    assert newest is not None
    evaluations = turn.state.evaluations
    evaluations.append(Evaluation(id=len(evaluations) + 1, name=name, version=newest.version))


def _assign(turn: Turn, evaluation: Evaluation) -> None:
    state = turn.state
    able = [
        replica
        for replica in state.replicas.values()
        if replica.version == evaluation.version and health.takes_work(state, replica) and not replica.draining
    ]
    if not able:
        if not fleet.may_come_back(state, evaluation.version):
            newest = versions.newest(state)
            evaluation.version = newest.version if newest else evaluation.version  # its version is gone
        return
    health.given(turn, able[0], 1)
    evaluation.worker, evaluation.since = able[0].id, turn.at
    assert evaluation.version is not None
    turn.emit(RunEvaluation(cause=turn.cause, worker=able[0].id, evaluation=evaluation.id, version=evaluation.version))


def is_pending(turn: Turn) -> bool:
    """Whether a result is still to come: one is under way, or the last version is yet to be published for it."""
    state = turn.state
    if any(not evaluation.done for evaluation in state.evaluations):
        return True
    if not turn.settings.evaluate or any(evaluation.name == "after" for evaluation in state.evaluations):
        return False
    return any(versions.is_coming(record) for record in state.versions[-1:])


def on_finished(turn: Turn, event: EvaluationFinished) -> None:
    """Keep the result."""
    for evaluation in turn.state.evaluations:
        if evaluation.id == event.evaluation and not evaluation.done:
            evaluation.done = True
            evaluation.accuracy, evaluation.score = event.accuracy, event.score
            evaluation.num_prompts = event.num_prompts
            _release(turn, evaluation)


def on_failed(turn: Turn, event: EvaluationFailed) -> None:
    """Try again elsewhere, a few times."""
    for evaluation in turn.state.evaluations:
        if evaluation.id == event.evaluation and not evaluation.done:
            _fail(turn, evaluation)


def _fail(turn: Turn, evaluation: Evaluation) -> None:
    evaluation.num_failures += 1
    evaluation.done = evaluation.num_failures >= FAILURES_MAX
    _release(turn, evaluation)


def deadline(state: State, timeout_s: float) -> float:
    """When the first evaluation under way has lasted too long; 0 = none is under way."""
    if not state.evaluations:
        return 0.0
    under_way = [e.since for e in state.evaluations if e.worker is not None and not e.done]
    return min(under_way) + timeout_s if under_way else 0.0


def check(turn: Turn) -> None:
    """Those that have lasted too long are tried elsewhere, as if they had failed."""
    for evaluation in turn.state.evaluations:
        if evaluation.worker is None or evaluation.done:
            continue
        if evaluation.since + turn.settings.evaluation_timeout_s <= turn.at:
            limit = f"task.eval_timeout_s = {turn.settings.evaluation_timeout_s:g}"
            text = f"evaluation {evaluation.name!r} by {evaluation.worker} did not end within {limit}"
            turn.emit(RaiseAlarm(cause=turn.cause, name="evaluation-timeout", text=text))
            turn.tell(text, story.worker(evaluation.worker))
            _fail(turn, evaluation)


def supersede(turn: Turn, restored: int) -> None:
    """The trainer went back to step `restored`: what was measured of later weights says nothing of the run's own."""
    for evaluation in turn.state.evaluations:
        if evaluation.name == "after" and evaluation.version is not None and evaluation.version.step > restored:
            evaluation.name = "superseded"
            evaluation.done = evaluation.done or evaluation.worker is None


def supersede_before(turn: Turn, last: int) -> None:
    """The run goes on to step `last`: what was measured of the weights of an earlier one was not of its last."""
    for evaluation in turn.state.evaluations:
        if evaluation.name == "after" and evaluation.version is not None and evaluation.version.step < last:
            evaluation.name = "superseded"
            evaluation.done = evaluation.done or evaluation.worker is None


def _release(turn: Turn, evaluation: Evaluation) -> None:
    if evaluation.worker in turn.state.replicas:
        turn.state.dirty[evaluation.worker] = None
    evaluation.worker = None
