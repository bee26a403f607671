"""What a checkpoint keeps of the data side, so that a resumed run goes on where the checkpoint was.

Groups that no step had trained when the checkpoint was made are given back: their prompts are drawn again first, their
trajectories are dropped{resume} in the ledger. What an operator had changed stays changed (`laminar.core.amend`); what he held or
watched for does not, and a step to stop after was one of the run before.
"""

import msgspec

from laminar.core.operator_records import ReplicaSettings, Value
from laminar.core.records import Account, Evaluation, Ledger, PromptPool, State
from laminar.core.trainer_records import Branch
from laminar.ids import WorkerId


class DataState(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the core's state that outlives the process in a checkpoint."""

    step: int
    branch: int
    prompts: PromptPool
    ledger: Ledger
    branches: list[Branch]
    evaluations: list[Evaluation]
    sampler_state: bytes
    sampler: str = ""
    """Chosen by an operator; empty = the configured one."""
    amended: dict[str, Value] = {}
    """Settings that an operator has changed."""
    replica_settings: dict[WorkerId, ReplicaSettings] = {}
    """What an operator has changed of replicas."""


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
        sampler_state=state.sampler_state,
        sampler=state.sampler,
        amended=state.amended,
        replica_settings=state.replica_settings,
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
    state.sampler, state.sampler_state = saved.sampler, saved.sampler_state
    state.amended, state.replica_settings = saved.amended, saved.replica_settings
    state.trainer.branch = saved.branch
    state.trainer.checkpoint = state.trainer.step = saved.step


def decode(data: bytes) -> DataState:
    """What `data_state` gave. Raises msgspec.DecodeError for anything else."""
    return msgspec.msgpack.decode(data, type=DataState)
