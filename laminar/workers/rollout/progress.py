"""What a replica has in flight and what its next report says. Pure: no clock, no I/O.

Invariants:
* An attempt is generating, rewarding, or forgotten. While it generates, every report lists it with its length.
* Its last tokens and its `Finished` (or `Failed`) travel in the same report; after that only its reward is spoken of.
* An aborted attempt that generated is named as `Aborted` in the report with its last tokens; then nothing more is said of it.
  One that finished before the engine could stop it is finished like any other.
"""

import msgspec

from laminar import wire
from laminar.ids import GroupId, TrajectoryId, Version
from laminar.workers.engines.base import Output, Usage

FINISHES = ("stop", "length", "env")


class Attempt(msgspec.Struct, kw_only=True, eq=False):
    """One attempt at one trajectory."""

    trajectory: TrajectoryId
    attempt: int
    prompt: wire.Prompt
    num_prompt_tokens: int
    tokens: list[int]
    """The whole response so far, prefix included."""
    num_reported: int
    """How many of `tokens` the controller has: at first the prefix."""
    logprobs: list[float] = msgspec.field(default_factory=list)
    """Of the unreported tokens."""
    sources: bytearray = msgspec.field(default_factory=bytearray)
    """Of the unreported tokens, as in `wire.RolloutReport`; empty = all are the model's."""
    answer: str | None = None
    """What is scored; None = the text of the response."""
    aborted: bool = False

    @property
    def identity(self) -> tuple[TrajectoryId, int]:
        return (self.trajectory, self.attempt)


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """The time that a report covers, as in `wire.RolloutReport`."""

    decode_busy_s: float
    interval_s: float
    since: float


class Progress:
    """All attempts of one replica. Engine keys are the caller's, unique among live requests."""

    def __init__(self) -> None:
        self._generating: dict[int, Attempt] = {}
        self._ended: list[Attempt] = []
        """Not generating any more, with tokens that still have to be reported."""
        self._rewarding: dict[tuple[TrajectoryId, int], Attempt] = {}
        self._prompts: list[wire.PromptTokens] = []
        self._finished: list[wire.Finished] = []
        self._rewarded: list[wire.Rewarded] = []
        self._failed: list[wire.Failed] = []
        self._aborted: list[wire.Aborted] = []
        self._listed_before = False

    @property
    def num_generating(self) -> int:
        return len(self._generating)

    @property
    def num_unaborted(self) -> int:
        """Those that generate and were not told to stop."""
        return sum(not attempt.aborted for attempt in self._generating.values())

    @property
    def has_news(self) -> bool:
        """A report would carry more than lengths that did not change."""
        news = self._prompts or self._finished or self._rewarded or self._failed or self._aborted or self._ended
        return bool(news) or any(attempt.logprobs for attempt in self._generating.values())

    @property
    def has_report(self) -> bool:
        """Something is to be said, if only that nothing generates any more."""
        return self.has_news or bool(self._generating) or self._listed_before

    # ---- facts ---------------------------------------------------------------------------------------------

    def assigned(self, group: GroupId, prompt_tokens: list[int]) -> None:
        """A group came with this prompt."""
        self._prompts.append(wire.PromptTokens(group=group, tokens=wire.pack_i32(prompt_tokens)))

    def submitted(self, key: int, attempt: Attempt) -> None:
        """The engine generates this attempt under `key`."""
        self._generating[key] = attempt

    def began(self, key: int, group: GroupId, prompt_tokens: list[int]) -> None:
        """The agent of this attempt has made its first call: it has a prompt now."""
        attempt = self._generating[key]
        attempt.num_prompt_tokens = len(prompt_tokens)
        prompt = wire.PromptTokens(
            group=group,
            tokens=wire.pack_i32(prompt_tokens),
            trajectory=attempt.trajectory,
            attempt=attempt.attempt,
        )
        self._prompts.append(prompt)

    def grew(self, key: int, tokens: list[int], logprobs: list[float], sources: bytes) -> None:
        """The response of an agent's attempt has new tokens, of model and environment."""
        attempt = self._generating[key]
        attempt.tokens += tokens
        attempt.logprobs += logprobs
        attempt.sources += sources

    def gave_up(self, key: int, kind: str, reason: str, detail: str) -> None:
        """An attempt that generates has failed by itself."""
        attempt = self._generating.pop(key)
        if attempt.logprobs:
            self._ended.append(attempt)
        self.failed(attempt.trajectory, attempt.attempt, kind, reason, detail)

    def completed(self, attempt: Attempt, finish_reason: str | None) -> None:
        """Nothing is to be generated, only scored. `finish_reason` None: the controller knows that it is finished."""
        self._rewarding[attempt.identity] = attempt
        if finish_reason is not None:
            self._finished.append(_finished(attempt, finish_reason, 0.0, 0.0))

    def generated(self, output: Output) -> Attempt | None:
        """New tokens or the end of a request; the attempt when its reward is due now. Unknown keys are ignored."""
        attempt = self._generating.get(output.key)
        if attempt is None:
            return None
        attempt.tokens += output.tokens
        attempt.logprobs += output.logprobs
        if output.finish_reason is None:
            return None
        del self._generating[output.key]
        if attempt.logprobs:
            self._ended.append(attempt)
        return self._end(attempt, output)

    def failed(self, trajectory: TrajectoryId, attempt: int, kind: str, reason: str, detail: str = "") -> None:
        """This attempt ended without a usable trajectory."""
        failure = wire.Failed(trajectory=trajectory, attempt=attempt, kind=kind, reason=reason, detail=detail)
        self._failed.append(failure)

    def rewarded(self, attempt: Attempt, reward: float, parts: dict[str, float], reward_s: float) -> None:
        """The score of a finished attempt."""
        if self._rewarding.pop(attempt.identity, None) is not None:
            self._rewarded.append(
                wire.Rewarded(
                    trajectory=attempt.trajectory,
                    attempt=attempt.attempt,
                    reward=reward,
                    parts=parts,
                    reward_s=reward_s,
                )
            )

    def unrewarded(self, attempt: Attempt, kind: str, reason: str, detail: str) -> None:
        """A finished attempt has no score."""
        if self._rewarding.pop(attempt.identity, None) is not None:
            self.failed(attempt.trajectory, attempt.attempt, kind, reason, detail)

    def withdrawn(self, trajectory: TrajectoryId, attempt: int) -> None:
        """An attempt was aborted before it was submitted."""
        self._aborted.append(wire.Aborted(trajectory=trajectory, attempt=attempt))

    def abort(self, trajectory: TrajectoryId, attempt: int) -> int | None:
        """Say no more of this attempt than its tokens and that it ended; the engine's key if it still generates.

        One that has finished is past stopping: its reward follows (a controller that voided it ignores that).
        """
        for key, candidate in self._generating.items():
            if candidate.identity == (trajectory, attempt):
                candidate.aborted = True
                return key
        return None

    # ---- the report ----------------------------------------------------------------------------------------

    def report(
        self, version: Version | None, usage: Usage, interval: Interval, agents: dict[str, int] | None = None
    ) -> wire.RolloutReport:
        """Everything since the last report, which is thereby reported."""
        attempts = [*self._ended, *self._generating.values()]
        new = [len(attempt.tokens) - attempt.num_reported for attempt in attempts]
        report = wire.RolloutReport(
            version=version,
            trajectories=wire.pack_i64([attempt.trajectory for attempt in attempts]),
            attempts=wire.pack_i32([attempt.attempt for attempt in attempts]),
            num_tokens=wire.pack_i32([len(attempt.tokens) for attempt in attempts]),
            num_new=wire.pack_i32(new),
            tokens=wire.pack_i32([token for each in attempts for token in each.tokens[each.num_reported :]]),
            logprobs=wire.pack_f32([logprob for each in attempts for logprob in each.logprobs]),
            sources=_sources(attempts),
            prompts=self._prompts,
            finished=self._finished,
            rewarded=self._rewarded,
            failed=self._failed,
            aborted=self._aborted,
            num_running=usage.num_running,
            num_waiting=usage.num_waiting,
            kv_tokens=usage.kv_tokens,
            decode_busy_s=interval.decode_busy_s,
            interval_s=interval.interval_s,
            since=interval.since,
            agents=agents or {},
        )
        self._reported(attempts)
        return report

    def _reported(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            attempt.num_reported, attempt.logprobs, attempt.sources = len(attempt.tokens), [], bytearray()
        self._listed_before = bool(self._generating)
        self._ended, self._prompts, self._finished, self._rewarded = [], [], [], []
        self._failed, self._aborted = [], []

    def _end(self, attempt: Attempt, output: Output) -> Attempt | None:
        reason = output.finish_reason
        assert reason is not None
        if attempt.aborted and reason not in FINISHES:
            self._aborted.append(wire.Aborted(trajectory=attempt.trajectory, attempt=attempt.attempt))
            return None
        if reason in FINISHES:
            self._finished.append(_finished(attempt, reason, output.queued_s, output.decode_s))
            self._rewarding[attempt.identity] = attempt
            return attempt
        self.failed(attempt.trajectory, attempt.attempt, "infra", "engine_error", reason.removeprefix("error: "))
        return None


def _sources(attempts: list[Attempt]) -> bytes:
    """Of all unreported tokens; empty if all are the model's."""
    if not any(attempt.sources for attempt in attempts):
        return b""
    return b"".join(bytes(attempt.sources) or bytes(len(attempt.logprobs)) for attempt in attempts)


def _finished(attempt: Attempt, reason: str, queued_s: float, decode_s: float) -> wire.Finished:
    return wire.Finished(
        trajectory=attempt.trajectory,
        attempt=attempt.attempt,
        finish_reason=reason,
        num_prompt_tokens=attempt.num_prompt_tokens,
        num_tokens=len(attempt.tokens),
        queued_s=queued_s,
        decode_s=decode_s,
    )
