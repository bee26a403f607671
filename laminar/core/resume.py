"""What a checkpoint keeps of the data side, so that a resumed run goes on where the checkpoint was.

Groups that no step had trained when the checkpoint was made are given back: their prompts are drawn again first, their
trajectories are dropped{resume} in the ledger.
"""

import msgspec

from laminar.core.records import Account, Evaluation, Ledger, PromptPool, State
from laminar.core.trainer_records import Branch


class DataState(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the core's state that outlives the process in a checkpoint."""

    step: int
    branch: int
    prompts: PromptPool
    ledger: Ledger
    branches: list[Branch]
    evaluations: list[Evaluation]
    sampler_state: bytes


def data_state(state: State, step: int) -> bytes:
    """msgpack of the `DataState` that a checkpoint of `step` carries."""
    untrained = [group.prompt for group in state.groups.values() if not 0 < group.step <= step]
    prompts = PromptPool(
        epoch=state.prompts.epoch,
        position=state.prompts.position,
        returned=untrained + state.prompts.returned,
    )
    trained = [
        state.trajectories[trajectory]
        for group in state.groups.values()
        if 0 < group.step <= step
        for trajectory in group.trajectories
    ]
    trajectories = _as_committed(state.ledger.trajectories, len(trained))
    tokens = _as_committed(state.ledger.tokens, sum(trajectory.num_tokens for trajectory in trained))
    saved = DataState(
        step=step,
        branch=state.trainer.branch,
        prompts=prompts,
        ledger=Ledger(trajectories=trajectories, tokens=tokens),
        branches=state.branches,
        evaluations=[evaluation for evaluation in state.evaluations if evaluation.done],
        sampler_state=state.sampler_state if not state.sampler else b"",  # the configured one would not know it
    )
    return msgspec.msgpack.encode(saved)


def _as_committed(account: Account, trained: int) -> Account:
    """The account as it will be when the checkpoint is complete and everything that it did not train was given back."""
    given_back = account.in_flight + account.buffered + account.leased - trained
    dropped = dict(account.dropped)
    if given_back:
        dropped["resume"] = dropped.get("resume", 0) + given_back
    return Account(total=account.total, committed=account.committed + trained, dropped=dropped)


def restore(state: State, data: bytes) -> None:
    """Continue a fresh state from what a checkpoint carried. Raises msgspec.DecodeError for anything else."""
    saved = decode(data)
    state.prompts, state.ledger = saved.prompts, saved.ledger
    state.branches, state.evaluations = saved.branches, saved.evaluations
    state.sampler_state = saved.sampler_state
    state.trainer.branch = saved.branch
    state.trainer.checkpoint = state.trainer.step = saved.step


def decode(data: bytes) -> DataState:
    """What `data_state` gave. Raises msgspec.DecodeError for anything else."""
    return msgspec.msgpack.decode(data, type=DataState)
