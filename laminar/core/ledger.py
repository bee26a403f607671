"""The closed ledger: every drawn trajectory and every received token is in exactly one place.

total = in_flight + buffered + leased + committed + sum(dropped)
"""

from collections.abc import Iterable

from laminar.core.records import Account, GroupState, State, Trajectory
from laminar.ids import GroupId


def draw(state: State, num: int) -> None:
    """`num` new trajectories are in flight."""
    account = state.ledger.trajectories
    account.total += num
    account.in_flight += num


def receive(state: State, num_tokens: int) -> None:
    """`num_tokens` response tokens of trajectories in flight arrived."""
    account = state.ledger.tokens
    account.total += num_tokens
    account.in_flight += num_tokens


def move(state: State, trajectories: Iterable[Trajectory], source: str, target: str) -> None:
    """Trajectories go with their tokens from one place to another (`in_flight`, `buffered`, `leased`, `committed`)."""
    for account, amount in _amounts(state, trajectories):
        setattr(account, source, getattr(account, source) - amount)
        setattr(account, target, getattr(account, target) + amount)


def drop(state: State, trajectory: Trajectory, source: str, reason: str) -> None:
    """A trajectory ends with its tokens as dropped{reason}."""
    trajectory.dropped = reason
    for account, amount in _amounts(state, (trajectory,)):
        setattr(account, source, getattr(account, source) - amount)
        account.dropped[reason] = account.dropped.get(reason, 0) + amount


def drop_tokens(state: State, num_tokens: int, reason: str) -> None:
    """Tokens of a trajectory in flight are void; the trajectory itself goes on."""
    if num_tokens:
        account = state.ledger.tokens
        account.in_flight -= num_tokens
        account.dropped[reason] = account.dropped.get(reason, 0) + num_tokens


def lose(account: Account, committed: int, reason: str) -> int:
    """Of what was committed only so much still is; the rest, which is returned, is dropped{reason}."""
    amount = max(0, account.committed - committed)
    account.committed -= amount
    if amount:
        account.dropped[reason] = account.dropped.get(reason, 0) + amount
    return amount


def _amounts(state: State, trajectories: Iterable[Trajectory]) -> list[tuple[Account, int]]:
    lengths = [trajectory.num_tokens for trajectory in trajectories]
    return [(state.ledger.trajectories, len(lengths)), (state.ledger.tokens, sum(lengths))]


def is_closed(account: Account) -> bool:
    """Whether the account adds up."""
    places = account.in_flight + account.buffered + account.leased + account.committed
    return account.total == places + sum(account.dropped.values())


def recount(state: State) -> dict[str, tuple[int, int]]:
    """(trajectories, tokens) per place, counted from the records instead of the books."""
    counts = {place: (0, 0) for place in GroupState}
    place_of: dict[GroupId, GroupState] = {group.id: group.state for group in state.groups.values()}
    for trajectory in state.trajectories.values():
        place = place_of[trajectory.group]
        num, tokens = counts[place]
        counts[place] = (num + 1, tokens + trajectory.num_tokens)
    return {place.value: count for place, count in counts.items()}
