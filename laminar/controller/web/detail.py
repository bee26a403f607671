"""One replica, group or trajectory, for whoever clicks on it: from the core while it lives, else from `run.db`."""

import asyncio
import json
import sqlite3
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from laminar import wire
from laminar.controller.effects import Prompts
from laminar.controller.trajectoryrows import Stalenesses
from laminar.controller.web import text
from laminar.controller.web.records import Records
from laminar.core import explain, story
from laminar.core.engine import Core
from laminar.core.records import Group, Trajectory
from laminar.core.turn import Turn
from laminar.ids import GroupId, PromptId, TrajectoryId, WorkerId, format_id

TRAJECTORIES_SHOWN = 200  # of a replica
LANES_S_MAX = 3600.0
TOKENS_SHOWN = 2048  # at a time
STORY_SHOWN = 40
NOT_HELD = "Its tokens are no longer held: it was committed to a checkpoint, or dropped, and they were forgotten."
NO_TOKEN = "No token of it has come yet."
Rows = Callable[[list[TrajectoryId]], list[wire.TokenRow]]
TIMES = ("queued", "first_token", "finished", "rewarded", "sampled", "trained")


class Detail:
    """Routes. `rows` as of `laminar.controller.tokens.TokenStore`."""

    def __init__(
        self,
        core: Core,
        prompts: Prompts,
        rows: Rows,
        pieces: text.Pieces,
        records: Records,
    ) -> None:
        self._core, self._prompts, self._rows, self._pieces, self._records = core, prompts, rows, pieces, records
        self._reading = asyncio.Lock()
        """One reader at a time: many would only slow the controller down."""

    def routes(self) -> list[web.RouteDef]:
        """For people."""
        return [
            web.get("/v1/dashboard/lanes", self._lanes),
            web.get("/v1/dashboard/replica/{name}", self._replica),
            web.get("/v1/dashboard/group/{id}", self._group),
            web.get("/v1/dashboard/trajectory/{id}", self._trajectory),
        ]

    async def _lanes(self, request: web.Request) -> web.Response:
        """What is too old for the pages to have it: `?from=…&to=…`, run time in seconds."""
        try:
            begin, end = float(request.query["from"]), float(request.query["to"])
            if not 0 < end - begin <= LANES_S_MAX:
                raise ValueError(f"at most {LANES_S_MAX:g} s can be asked for")
        except (KeyError, ValueError) as error:
            return web.json_response({"error": f"?from=…&to=… in seconds are expected: {error}"}, status=400)
        try:
            lanes = await self._read(lambda: self._records.lanes(begin, end))
            moves = await self._read(lambda: self._records.moves(begin, end))
            trains = await self._read(lambda: self._records.trains(begin, end))
        except sqlite3.Error as error:
            return _unreadable(error)
        return _answer({"lanes": lanes, "moves": moves, "trains": trains})

    # ---- replica -------------------------------------------------------------------------------------------

    async def _replica(self, request: web.Request) -> web.Response:
        worker = WorkerId(request.match_info["name"])
        try:
            why = self._why(worker)
        except LookupError as error:
            if not self._core.story.of(worker):
                return _missing(error)
            return self._replica_without_process(
                worker, {"text": f"{worker} has left the run", "lines": []}, live=False
            )
        replica, records = self._core.state.replicas.get(worker), self._core.state.trajectories
        if replica is None:
            return self._replica_without_process(worker, why, live=True)
        has = [records[t] for t in list(replica.attempts)[:TRAJECTORIES_SHOWN]]
        return _answer(
            {
                "live": True,
                "why": why,
                "host": replica.host,
                "trajectories": [_member(t) for t in has],
                "more": max(0, len(replica.attempts) - len(has)),
                "story": self._story(worker),
            }
        )

    def _replica_without_process(self, worker: WorkerId, why: dict[str, Any], *, live: bool) -> web.Response:
        return _answer({"live": live, "why": why, "trajectories": [], "more": 0, "story": self._story(worker)})

    # ---- group ---------------------------------------------------------------------------------------------

    async def _group(self, request: web.Request) -> web.Response:
        try:
            number = GroupId(_parse(request.match_info["id"], "g"))
        except ValueError as error:
            return _missing(error)
        group = self._core.state.groups.get(number)
        if group is not None:
            return _answer(self._live_group(group))
        try:
            found = await self._read(lambda: self._records.siblings(number))
        except sqlite3.Error as error:
            return _unreadable(error)
        if not found:
            return await self._unknown(f"group g{format_id(number)}")
        members = [_past_member(row) for row in found]
        return _answer({**self._of_prompt(found[0]["prompt"]), "live": False, "why": _past_why(found[0]),
                        "version": found[0]["behavior_version"], "worker": None, "trajectories": members,
                        "story": self._story(story.group(number))})  # fmt: skip

    def _live_group(self, group: Group) -> dict[str, Any]:
        records, subject = self._core.state.trajectories, story.group(group.id)
        return {
            **self._of_prompt(group.prompt),
            "live": True,
            "why": self._why(subject),
            "version": _text(group.version),
            "worker": group.worker,
            "trajectories": [_member(records[t]) for t in group.trajectories if t in records],
            "story": self._story(subject),
        }

    def _of_prompt(self, number: int) -> dict[str, Any]:
        try:
            prompt = self._prompts.prompt(PromptId(number))
        except IndexError:  # of another data set, before a resume
            return {"prompt": number, "prompt_text": "", "answer": ""}
        return {"prompt": number, "prompt_text": text.of_prompt(prompt), "answer": prompt.answer}

    # ---- trajectory ----------------------------------------------------------------------------------------

    async def _trajectory(self, request: web.Request) -> web.Response:
        try:
            number = TrajectoryId(_parse(request.match_info["id"], "t"))
            first = max(0, int(request.query.get("from", "0")))
        except ValueError as error:
            return _missing(error)
        record = self._core.state.trajectories.get(number)
        try:
            known = self._live_trajectory(record) if record else await self._read(lambda: self._past_trajectory(number))
            tokens = await self._read(lambda: self._tokens(number, first))
        except sqlite3.Error as error:
            return _unreadable(error)
        if known is None:
            return await self._unknown(f"trajectory t{format_id(number)}")
        if tokens["tokens"] is None and record is not None and not record.num_tokens:
            tokens["why_no_tokens"] = NO_TOKEN
        return _answer({**self._of_prompt(known["prompt"]), **known, **tokens})

    def _live_trajectory(self, t: Trajectory) -> dict[str, Any]:
        subject = story.trajectory(t.id)
        s_gen, residence, s_train = Stalenesses(self._core.state.branches).of(t)
        names = ("attempt", "prompt", "num_tokens", "num_prompt_tokens", "finish_reason", "failure", "reward_parts")
        return {
            **{name: getattr(t, name) for name in names},
            **{f"{name}_version": _text(getattr(t, f"{name}_version")) for name in ("behavior", "finish", "sample")},
            "live": True,
            "why": self._why(subject),
            "group": story.group(t.group),
            "reward": t.reward if t.timings.rewarded else None,
            "s_gen": s_gen,
            "residence": residence,
            "s_train": s_train,
            "timings": {name: getattr(t.timings, name) for name in TIMES},
            "story": self._story(subject),
        }

    def _past_trajectory(self, number: TrajectoryId) -> dict[str, Any] | None:
        row = self._records.trajectory(number)
        if row is None:
            return None
        names = ("attempt", "prompt", "num_tokens", "num_prompt_tokens", "finish_reason", "reward", "s_gen", "residence",
                 "s_train", "behavior_version", "finish_version", "sample_version")  # fmt: skip
        return {
            **{name: row[name] for name in names},
            "failure": "",
            "live": False,
            "why": _past_why(row),
            "group": story.group(row["group_id"]),
            "reward_parts": json.loads(row["reward_parts"] or "{}"),
            "timings": {name: row[f"{name}_at"] or 0.0 for name in TIMES},
            "story": [],
        }

    def _tokens(self, number: TrajectoryId, first: int) -> dict[str, Any]:
        """Some of its tokens: [id, text, log-prob, source] each; and the prompt."""
        try:
            (row,) = self._rows([number])
        except KeyError:
            return {"tokens": None, "why_no_tokens": NOT_HELD}
        ids, logprobs = array("i", row.tokens).tolist(), array("f", row.logprobs).tolist()
        sources = list(row.sources) or [0] * len(ids)
        last = first + TOKENS_SHOWN
        shown, pieces = slice(first, last), self._pieces.of(ids, first, last)
        told = zip(ids[shown], pieces, (round(value, 4) for value in logprobs[shown]), sources[shown], strict=True)
        prompt = self._prompt_of(array("i", row.prompt_tokens).tolist())
        return {
            "first": first,
            "most": TOKENS_SHOWN,
            "tokens": list(told),
            "why_no_text": self._pieces.why_not,
            **prompt,
        }

    def _prompt_of(self, ids: list[int]) -> dict[str, Any]:
        """As the model saw it, the end if it is long; nothing if there is no text."""
        left_out = max(0, len(ids) - TOKENS_SHOWN)
        words = "".join(self._pieces.of(ids, left_out))
        return {} if self._pieces.why_not else {"prompt_text": words, "prompt_left_out": left_out}

    # ---- parts ---------------------------------------------------------------------------------------------

    def _why(self, subject: str) -> dict[str, Any]:
        core = self._core
        found = explain.why(Turn(core.state, core.settings, core.story), subject)
        return {"text": found.text, "lines": [[line.topic, line.text] for line in found.lines]}

    def _story(self, subject: str) -> list[dict[str, Any]]:
        rows = self._core.story.of(subject)[-STORY_SHOWN:]
        return [{"at": row.at, "text": row.text, "because": row.because} for row in rows]

    async def _unknown(self, what: str) -> web.Response:
        try:
            gone = await self._read(self._records.num_gone)
        except sqlite3.Error as error:
            return _unreadable(error)
        also = f", or its record is one of {gone:,} that have left the log (log.max_mib)" if gone else ""
        return _missing(LookupError(f"there is no {what}{also}"))

    async def _read(self, work: Callable[[], Any]) -> Any:
        async with self._reading:
            return await asyncio.to_thread(work)


def _parse(subject: str, kind: str) -> int:
    if not subject.startswith(kind):
        raise ValueError(f"{subject!r} does not begin with {kind!r}")
    return explain.parse_id(subject[1:])


def _member(t: Trajectory) -> dict[str, Any]:
    reward = t.reward if t.timings.rewarded else None
    return {"id": story.trajectory(t.id), "group": story.group(t.group), "state": t.state.value, "num_tokens": t.num_tokens,
            "reward": reward, "finish_reason": t.finish_reason, "failure": t.failure}  # fmt: skip


def _past_member(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": story.trajectory(row["id"]), "group": story.group(row["group_id"]), "failure": "",
            "state": f"dropped: {row['dropped']}" if row["dropped"] else "trained" if row["trained_at"] else "recorded",
            **{name: row[name] for name in ("num_tokens", "reward", "finish_reason")}}  # fmt: skip


def _past_why(row: dict[str, Any]) -> dict[str, Any]:
    where = f"dropped: {row['dropped']}" if row["dropped"] else f"trained in step {row['step']}, and committed"
    return {"text": where, "lines": []}


def _text(version: object) -> str | None:
    return str(version) if version is not None else None


def _answer(value: dict[str, Any]) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), content_type="application/json", headers={"Cache-Control": "no-store"}
    )


def _missing(error: Exception) -> web.Response:
    return web.json_response({"error": str(error.args[0]) if error.args else str(error)}, status=404)


def _unreadable(error: sqlite3.Error) -> web.Response:
    return web.json_response({"error": f"run.db cannot be read now: {error}"}, status=503)
