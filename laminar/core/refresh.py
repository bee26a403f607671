"""Refresh policies: when a replica admits new groups, and so when it drains and pulls newer weights. docs/policies/refresh.md.

* `batch` (the paper): a local batch of groups per pull; the next local batch begins when the last has drained.
* `continuous`: a replica admits while its version is the newest. When a newer one exists it stops admitting and drains, but at
  most a share of the fleet does so at once, oldest version first; the others go on admitting under the version they hold.
"""

from laminar.core import relays
from laminar.core.records import Replica
from laminar.core.turn import Turn
from laminar.ids import WorkerId


def may_admit(turn: Turn, replica: Replica) -> bool:
    """Whether the policy lets the replica begin a new group under the version it holds."""
    if turn.settings.refresh_policy == "continuous":
        return _holds_newest(turn, replica) or replica.id not in draining(turn)
    return replica.admit_left > 0 or _begins_local_batch(turn, replica)


def admit(turn: Turn, replica: Replica) -> None:
    """Take note of a group that is about to begin."""
    if _begins_local_batch(turn, replica):
        replica.admit_left = turn.settings.local_batch_groups
    replica.admit_left -= 1


def _holds_newest(turn: Turn, replica: Replica) -> bool:
    """Whether the relay of its host has nothing newer for it."""
    return relays.newer(turn.state, replica) is None


def _begins_local_batch(turn: Turn, replica: Replica) -> bool:
    """Its local batch is done and there is nothing newer to pull: the next one is of the same version."""
    return replica.num_generating == 0 and not replica.incoming and _holds_newest(turn, replica)


def draining(turn: Turn) -> dict[WorkerId, None]:
    """`continuous`: the replicas that drain now, at most `draining_share` of the fleet (at least one), oldest version first."""
    replicas = turn.state.replicas.values()
    behind = [r for r in replicas if r.version is not None and not _holds_newest(turn, r)]
    order = {record.version: index for index, record in enumerate(turn.state.versions)}
    behind.sort(key=lambda r: (order.get(r.version, -1), r.num_generating))  # type: ignore[arg-type]
    num = max(1, int(turn.settings.draining_share * len(turn.state.replicas)))
    return dict.fromkeys(replica.id for replica in behind[:num])
