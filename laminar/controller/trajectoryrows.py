"""Trajectories as rows of `run.db`, and how stale each was: thousands at once, when a step ends, while the event loop waits."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from laminar.controller.schema import Statement
from laminar.core import versions
from laminar.core.records import Trajectory
from laminar.ids import Version

STATEMENT = f"INSERT OR REPLACE INTO trajectories VALUES ({', '.join('?' * 25)})"
_encode = msgspec.json.Encoder().encode


class Stalenesses:
    """Of many trajectories, which have few versions among them."""

    def __init__(self, branches: list[Any]) -> None:
        self._branches = branches
        self._known: dict[tuple[Version, Version], int] = {}

    def of(self, t: Trajectory) -> tuple[int | None, int | None, int | None]:
        """(s_gen, residence, s_train) in trainer steps, as far as they are known."""
        if not (t.finish_version and t.behavior_version):
            return None, None, None
        s_gen = self._between(t.finish_version, t.behavior_version)
        if not t.sample_version:
            return s_gen, None, None
        residence = self._between(t.sample_version, t.finish_version)
        return s_gen, residence, s_gen + residence

    def _between(self, new: Version, old: Version) -> int:
        found = self._known.get((new, old))
        if found is None:
            found = self._known[new, old] = versions.staleness(self._branches, new, old)
        return found


def statements(trajectories: Sequence[Trajectory], branches: list[Any]) -> Iterator[Statement]:
    """One for each."""
    stalenesses, names = Stalenesses(branches), dict[Version | None, str | None]({None: None})
    for t in trajectories:
        for version in (t.behavior_version, t.finish_version, t.sample_version):
            if version not in names:
                names[version] = str(version)
        times = [moment or None for moment in msgspec.structs.astuple(t.timings)]
        yield STATEMENT, (
            t.id, t.prompt, t.group, t.sibling, t.attempt,
            names[t.behavior_version], names[t.finish_version], names[t.sample_version], t.digest,
            t.num_prompt_tokens, t.num_tokens, t.reward if t.timings.rewarded else None, _encode(t.reward_parts).decode(),
            t.finish_reason, t.step or None, t.dropped or None, *stalenesses.of(t), *times,
        )  # fmt: skip
