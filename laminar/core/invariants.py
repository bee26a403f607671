"""What must hold after every event. `check` raises AssertionError with the first violation; tests and the simulator call it."""

from laminar.core import ledger
from laminar.core.records import GroupState, ReplicaState, State, TrajectoryState


def check(state: State) -> None:
    """Check the whole state: O(trajectories)."""
    _check_ledger(state)
    _check_trajectories(state)
    _check_groups(state)
    _check_moves(state)
    _check_replicas(state)
    _check_steps(state)
    _check_relays(state)
    _check_failovers(state)
    _check_draining_to_refresh(state)


def _check_ledger(state: State) -> None:
    counts = ledger.recount(state)
    for index, account in enumerate((state.ledger.trajectories, state.ledger.tokens)):
        assert ledger.is_closed(account), f"ledger does not add up: {account}"
        books = {"in_flight": account.in_flight, "buffered": account.buffered, "leased": account.leased}
        for place, amount in books.items():
            assert amount == counts[place][index], f"{place}: books say {amount}, records {counts[place][index]}"


def _check_trajectories(state: State) -> None:
    for t in state.trajectories.values():
        running = t.state in (TrajectoryState.GENERATING, TrajectoryState.REWARDING)
        if running:
            assert t.worker is not None, f"{t.id} is {t.state} nowhere"
            replica = state.replicas[t.worker]
            assert replica.attempts.get(t.id) == t.attempt, f"{t.id} is not among the attempts of {t.worker}"
            if t.state == TrajectoryState.GENERATING:
                assert replica.version == t.behavior_version, (
                    f"{t.id} of {t.behavior_version} runs on {replica.version}"
                )
        else:
            assert t.worker is None, f"{t.id} is {t.state} but has worker {t.worker}"


def _check_moves(state: State) -> None:
    for replica in state.replicas.values():
        for trajectory_id in replica.incoming:
            t = state.trajectories[trajectory_id]
            assert t.moving_to == replica.id, f"{replica.id} expects {t.id}, which goes to {t.moving_to}"
            assert replica.version == t.behavior_version, f"{replica.id} refreshed although {t.id} is on its way"
        for trajectory_id in replica.leaving:
            t = state.trajectories[trajectory_id]
            assert t.worker == replica.id, f"{t.id} leaves {replica.id}, but is at {t.worker}"
            assert t.moving_to is not None, f"{t.id} leaves {replica.id} for nowhere"
    for t in state.trajectories.values():
        if t.moving_to is not None:
            assert t.id in state.replicas[t.moving_to].incoming, f"{t.moving_to} does not expect {t.id}"


def _check_groups(state: State) -> None:
    for group in state.groups.values():
        members = [state.trajectories[t] for t in group.trajectories]
        if group.state == GroupState.IN_FLIGHT:
            num_open = sum(t.state not in (TrajectoryState.DONE, TrajectoryState.FAILED) for t in members)
            assert num_open == group.num_open > 0, f"group {group.id}: {num_open} open, books say {group.num_open}"
            queued = any(t.state == TrajectoryState.QUEUED for t in members)
            assert queued == (group.id in state.requeue), f"group {group.id}: queued siblings and requeue disagree"
        else:
            assert all(t.state == TrajectoryState.DONE for t in members), f"group {group.id} is not complete"
        assert (group.state == GroupState.BUFFERED) == (group.id in state.buffer)


def _check_replicas(state: State) -> None:
    syncing = [replica.id for replica in state.replicas.values() if replica.state == ReplicaState.SYNCING]
    assert sorted(state.pulls) == sorted(syncing), f"{list(state.pulls)} have a deadline for a pull, {syncing} pull"
    for replica in state.replicas.values():
        generating = 0
        for trajectory_id, attempt in replica.attempts.items():
            t = state.trajectories[trajectory_id]
            assert (t.worker, t.attempt) == (replica.id, attempt), f"{replica.id} is at a foreign attempt of {t.id}"
            generating += t.state == TrajectoryState.GENERATING
        assert generating == replica.num_generating, (
            f"{replica.id}: {generating} generating, books say {replica.num_generating}"
        )
        assert not (replica.state == ReplicaState.SYNCING and generating), f"{replica.id} generates while it pulls"
        assert replica.version is not None or not replica.attempts, f"{replica.id} works without weights"
        assert not (replica.suspect and replica.incoming), f"{replica.id} is suspect and something moves there"


def _check_steps(state: State) -> None:
    leased = [group for step in state.steps.values() for group in step.groups]
    assert len(set(leased)) == len(leased), "a group is leased twice"
    for step in state.steps.values():
        for group_id in step.groups:
            group = state.groups[group_id]
            assert (group.state, group.step) == (GroupState.LEASED, step.step), f"group {group_id}: lease disagrees"
    for step_number in state.steps:
        assert step_number > state.trainer.checkpoint, f"step {step_number} is committed and still leased"


def _check_relays(state: State) -> None:
    chain, order = state.chain, [record.version for record in state.versions]
    assert sorted(chain.order) == sorted(state.relays), f"chain {chain.order}, relays {list(state.relays)}"
    assert chain.master == (chain.order[0] if chain.order else None), f"{chain.master} does not lead {chain.order}"
    racks = [state.relays[w].rack for w in chain.order if w == chain.master or not state.relays[w].slow_since]
    runs = [rack for index, rack in enumerate(racks) if index == 0 or rack != racks[index - 1]]
    assert len(set(runs)) == len(runs), f"the racks {racks} of chain {chain.order} are not kept together"
    for relay in state.relays.values():
        known = [order.index(version) for version in relay.held if version in order]
        assert known == sorted(set(known)), f"{relay.id} holds {relay.held}: not in publication order"
        assert state.finished or set(relay.retained) <= set(relay.held), (
            f"{relay.id} keeps {relay.retained} of {relay.held}"
        )
    for record in state.versions:
        held = any(record.version in relay.held for relay in state.relays.values())
        assert record.ready == held, f"{record.version}: ready {record.ready}, held by a relay {held}"
        ordered = 0 < record.publication <= state.num_publications and state.publishing_to is not None
        assert not (record.deadline and record.retry_at), f"{record.version} is under way, and to be tried again"
        assert not record.deadline or ordered, f"{record.version} is under way, but nobody was told to publish it"


def _check_failovers(state: State) -> None:
    versions = [failover.version for failover in state.failovers.values()]
    assert len(set(versions)) == len(versions), f"two replicas serve one old version: {state.failovers}"
    assert state.failovers.keys() <= state.replicas.keys(), f"{list(state.failovers)} serve, but are lost"


def _check_draining_to_refresh(state: State) -> None:
    for worker in state.draining_to_refresh:
        assert worker in state.replicas, f"{worker} drains to refresh, but is lost"
        replica = state.replicas[worker]
        assert replica.version is not None, f"{worker} drains to refresh, but holds nothing"
        elsewhere = replica.draining or replica.suspect or replica.quarantined or worker in state.failovers
        assert not elsewhere or state.finished, f"{worker} takes another's turn to drain, but could not admit anyway"
