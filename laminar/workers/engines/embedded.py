"""Continuous batching over any Hugging Face causal LM, in this process.

    event loop                 lock                 decode thread
    submit ──► waiting (FIFO) ──────────────► admit, prefill ─► rows ─► decode, one token per row, forever
    abort  ──► marks the request ───────────► its row leaves between tokens
    drain  ◄── new tokens ◄─────────────────── after every step
    load_weights, logprobs ──► job ─────────► runs while there are no rows

Invariants:
* Row i of the KV cache, of the sampling columns and of `_rows` is the same request.
* A request is in `_waiting`, in `_rows`, or finished; it stays in `_live` until `drain` has delivered its finish.
* The worst case (prompt + most response tokens) of all rows together never exceeds `kv_tokens_max`.
* Every submitted request finishes: if a forward fails, all rows finish with ``error: …`` and the engine goes on with
  those that wait; if weights break half-way or the thread itself fails, everything finishes so and `submit` and
  `load_weights` raise RuntimeError from then on.
"""

import asyncio
import concurrent.futures
import contextlib
import itertools
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import structlog
import torch

from laminar.ids import Version
from laminar.workers.engines.base import EngineError, Output, Request, Usage, WeightsBroken
from laminar.workers.engines.causal_lm import CausalLM
from laminar.workers.engines.live import Live
from laminar.workers.engines.sampling import SamplingRows
from laminar.workers.engines.weights import replace_weights
from laminar.workers.relay.manifest import Snapshot

PREFILL_TOKENS_MAX = 4096  # padded tokens of one prefill, so running requests wait for one short forward only
JOIN_SHARE = 8  # a prefill costs about a decode step, so it waits for 1/8 of the running requests to join together …
JOIN_PATIENCE_STEPS = 8  # … but not longer than this many decode steps
STOP_TIMEOUT_S = 60.0  # one forward of a large model on a slow CPU; only then does the thread look up

log = structlog.get_logger()

_Result = TypeVar("_Result")


class _Job(msgspec.Struct):
    """Something for the decode thread to do with the model. WeightsBroken out of it ends the thread."""

    work: Callable[[CausalLM], Any]
    done: "concurrent.futures.Future[Any]"


class EmbeddedEngine:
    """The `Engine` protocol over transformers, on a GPU if there is one, else on the CPU.

    num_requests_max: most requests that decode together. context_tokens_max: 0 = the model's own limit.
    kv_tokens_max: 0 = num_requests_max full contexts; admission counts against it, memory follows the longest row times
    the rows. dtype: ``float32``, ``bfloat16`` or ``float16``; weight versions must come in the same one.
    """

    def __init__(
        self,
        model_path: str,
        *,
        num_requests_max: int,
        context_tokens_max: int = 0,
        kv_tokens_max: int = 0,
        dtype: str = "float32",
    ) -> None:
        """Raises ValueError for limits that are out of range; the model is read by `start`."""
        if num_requests_max < 1 or context_tokens_max < 0 or kv_tokens_max < 0:
            raise ValueError(
                f"num_requests_max {num_requests_max} must be positive, context_tokens_max {context_tokens_max} and "
                f"kv_tokens_max {kv_tokens_max} not negative"
            )
        self.num_requests_max = num_requests_max
        self.context_tokens_max, self.kv_tokens_max = context_tokens_max, kv_tokens_max
        self.num_requests_memory_bound = 0
        self._model_path, self._dtype = model_path, dtype
        self._model: CausalLM | None = None
        self._sampling = SamplingRows(num_requests_max)
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        """Guards everything below; notified when the thread has something new to look at."""
        self._live: dict[int, Live] = {}
        self._waiting: deque[Live] = deque()
        self._rows: list[Live] = []
        self._kv_reserved = 0
        self._ended: list[int] = []
        """Keys whose `on_finish` call is on its way to the loop."""
        self._jobs: deque[_Job] = deque()
        self._steps_since_join, self._busy_s = 0, 0.0
        self._closed: str | None = "the engine has not been started"

    # ---- event loop ----------------------------------------------------------------------------------------

    async def start(self, on_finish: Callable[[int], None]) -> None:
        """Load the model and start decoding. Raises StartError. Sets the limits that were 0."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before: make a new one")
        self._on_finish, self._thread_ended = on_finish, asyncio.Event()
        self._loop = asyncio.get_running_loop()
        model = await asyncio.to_thread(
            CausalLM, self._model_path, self.num_requests_max, self.context_tokens_max, self._dtype
        )
        self._model = model
        self.context_tokens_max = model.context_tokens_max
        self.num_requests_memory_bound = model.num_requests_memory_bound()
        self.kv_tokens_max = self.kv_tokens_max or self.num_requests_max * self.context_tokens_max
        self._closed = None
        self._thread = threading.Thread(target=self._main, args=(model,), name="embedded-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError when it can never run; RuntimeError when the engine is not running (any more)."""
        with self._changed:
            self._check_open()
            if request.key in self._live:
                raise ValueError(f"request {request.key} is live already: drain its finish before using the key again")
            assert self._model is not None
            live = Live.accept(
                request,
                vocab_size=self._model.vocab_size,
                context_tokens_max=self.context_tokens_max,
                kv_tokens_max=self.kv_tokens_max,
            )
            self._live[request.key] = live
            self._waiting.append(live)
            self._changed.notify()

    def abort(self, key: int) -> None:
        """End a request; its tokens so far and finish reason ``abort`` come with a later `drain`. Unknown keys are ignored."""
        with self._changed:
            live = self._live.get(key)
            if live is None or live.finish_reason is not None:
                return
            live.aborted = True
            if live.started_at is None:
                self._waiting.remove(live)
                self._finish(live, "abort")
            self._changed.notify()

    def drain(self) -> list[Output]:
        """New tokens of all requests since the last call, in submission order."""
        with self._changed:
            news = [live for live in self._live.values() if live.tokens or live.finish_reason is not None]
            outputs = [live.take_output() for live in news]
            for live in news:
                if live.finish_reason is not None:
                    del self._live[live.request.key]
        return outputs

    def usage(self) -> Usage:
        """Load right now; `kv_tokens` counts the tokens that rows hold, not what is set aside for them."""
        with self._changed:
            return Usage(
                num_running=len(self._rows),
                num_waiting=len(self._waiting),
                kv_tokens=sum(live.kv_tokens for live in self._rows),
                busy_s=self._busy_s,
            )

    async def load_weights(self, version: Version, snapshot: Snapshot) -> None:
        """Replace all weights. RuntimeError if a request runs or waits; ValueError, naming the tensor, if it does not fit.

        On either the old weights stay whole. Returns, also when cancelled, only after the snapshot was last read.
        """
        await self._idle_job(f"load weights {version}", lambda model: replace_weights(model.parameters, snapshot))

    async def logprobs(self, tokens: list[int]) -> list[float]:
        """Of `tokens[1:]`, each given those before it, at temperature 1. RuntimeError if a request runs or waits."""
        return await self._idle_job("compute log-probs", lambda model: model.logprobs(tokens))

    async def _idle_job(self, what: str, work: Callable[[CausalLM], _Result]) -> _Result:
        with self._changed:
            self._check_open()
            unfinished = sum(live.finish_reason is None for live in self._live.values())
            if unfinished:
                raise RuntimeError(f"cannot {what}: {unfinished} requests are running or waiting")
            job = _Job(work, concurrent.futures.Future())
            self._jobs.append(job)
            self._changed.notify()
        done = asyncio.wrap_future(job.done)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done])
            raise

    async def watch(self) -> None:
        await self._thread_ended.wait()
        raise EngineError(self._closed)

    async def stop(self) -> None:
        """End all requests with ``abort``, join the thread, free model and cache. Safe to call twice."""
        with self._changed:
            self._closed = self._closed or "the engine was stopped"
            self._changed.notify()
        thread = self._thread
        if thread is None:
            return
        await asyncio.to_thread(thread.join, STOP_TIMEOUT_S)
        if thread.is_alive():
            raise RuntimeError(f"the decode thread is still in a forward after {STOP_TIMEOUT_S:g} s; end the process")
        self._model = None

    def _check_open(self) -> None:
        if self._closed is not None:
            raise RuntimeError(self._closed)

    # ---- decode thread -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _main(self, model: CausalLM) -> None:
        """The thread: one step after another until the engine is closed. Whatever happens, nothing stays unfinished."""
        reason = "abort"
        try:
            while self._wait_for_work():
                self._step(model)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: what escapes would leave requests hanging
            reason = f"error: {_describe(error)}"
            with self._changed:
                self._closed = f"the engine is dead ({_describe(error)}): restart the worker"
            log.error("embedded_engine_died", model=self._model_path, traceback=_traceback(error))
        self._finish_all(reason)
        model.cache.clear()
        with contextlib.suppress(RuntimeError):  # see `_finish`
            self._loop.call_soon_threadsafe(self._thread_ended.set)

    def _wait_for_work(self) -> bool:
        """Block until a step can do something; False once the engine is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._jobs or self._waiting or self._rows)
            return self._closed is None

    def _step(self, model: CausalLM) -> None:
        """A job, or leavers, joiners and one token for everybody else."""
        began = time.monotonic()
        with self._changed:
            job = self._jobs.popleft() if self._jobs else None
        if job is not None:
            self._do(model, job)
        self._drop_aborted(model)
        with self._changed:
            joining = self._admit()
        try:
            if joining:
                self._prefill(model, joining)
            if self._rows:
                self._decode(model)
        except Exception as error:  # noqa: BLE001 - model code of any architecture may raise anything; no request may hang
            self._fail_rows(model, error)
        with self._changed:
            self._busy_s += time.monotonic() - began

    def _admit(self) -> list[Live]:
        """Take requests off the queue, in order, while rows, KV and the prefill bound allow; they become the last rows."""
        self._steps_since_join += 1
        num_fitting = self._num_fitting()
        enough = max(1, len(self._rows) // JOIN_SHARE)
        if num_fitting == 0 or (num_fitting < enough and self._steps_since_join <= JOIN_PATIENCE_STEPS):
            return []
        joining: list[Live] = []
        distinct: set[tuple[int, ...]] = set()
        longest = 0
        for _ in range(num_fitting):
            sequence = self._waiting[0].sequence
            distinct.add(sequence)
            longest = max(longest, len(sequence))
            if joining and len(distinct) * longest > PREFILL_TOKENS_MAX:
                break
            live = self._waiting.popleft()
            live.started_at = time.monotonic()
            self._kv_reserved += live.kv_tokens_max
            joining.append(live)
        self._steps_since_join = 0
        self._rows.extend(joining)
        return joining

    def _num_fitting(self) -> int:
        """How many requests from the head of the queue could join now; none while a job waits."""
        if self._jobs:
            return 0
        room = min(len(self._waiting), self.num_requests_max - len(self._rows))
        kv_tokens = self._kv_reserved
        for count, live in enumerate(itertools.islice(self._waiting, room)):
            kv_tokens += live.kv_tokens_max
            if kv_tokens > self.kv_tokens_max:
                return count
        return room

    def _prefill(self, model: CausalLM, joining: list[Live]) -> None:
        """Compute each distinct sequence once (siblings share it) and sample the first new token of every joiner."""
        numbers: dict[tuple[int, ...], int] = {}
        copies = []
        start = model.cache.num_rows
        for row, live in enumerate(joining, start):
            copies.append(numbers.setdefault(live.sequence, len(numbers)))
            self._sampling.set(row, live.request.sampling, live.num_tokens)
        logits = model.prefill([list(sequence) for sequence in numbers], copies)
        self._deliver(model, *self._sampling.sample(logits, start), start)

    def _decode(self, model: CausalLM) -> None:
        logits = model.decode([live.last_token for live in self._rows])
        self._deliver(model, *self._sampling.sample(logits, 0), 0)

    def _deliver(self, model: CausalLM, tokens: list[int], logprobs: list[float], start: int) -> None:
        """Hand out one token per row from `start` on and take out the rows that ended with it."""
        ended = []
        with self._changed:
            for row, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start):
                if math.isfinite(logprob):
                    reason = self._rows[row].append(token, logprob)
                else:
                    reason = "error: the model gave logits that are not finite numbers"
                if reason is not None:
                    ended.append((row, reason))
        self._leave(model, ended)

    def _drop_aborted(self, model: CausalLM) -> None:
        with self._changed:
            ended = [(row, "abort") for row, live in enumerate(self._rows) if live.aborted]
        self._leave(model, ended)

    def _leave(self, model: CausalLM, ended: list[tuple[int, str]]) -> None:
        """Finish rows, given in ascending order; from the back, so that no row to come is moved."""
        for row, reason in reversed(ended):
            if reason.startswith("error"):
                model.cache.erase(row)
            last = model.cache.remove(row)
            self._sampling.move(last, row)
            with self._changed:
                live, self._rows[row] = self._rows[row], self._rows[last]
                self._rows.pop()
                self._kv_reserved -= live.kv_tokens_max
                self._finish(live, reason)

    def _fail_rows(self, model: CausalLM, error: Exception) -> None:
        num_failed = len(self._rows)
        model.cache.clear()
        with self._changed:
            for live in self._rows:
                self._finish(live, f"error: {_describe(error)}")
            self._rows.clear()
            self._kv_reserved = 0
        log.error("embedded_engine_step_failed", num_requests=num_failed, traceback=_traceback(error))

    def _do(self, model: CausalLM, job: _Job) -> None:
        """Errors are raised where the job is awaited; broken weights end the engine as well."""
        try:
            result = job.work(model)
        except WeightsBroken as error:
            job.done.set_exception(error)
            raise
        except Exception as error:  # noqa: BLE001 - see above
            job.done.set_exception(error)
        else:
            job.done.set_result(result)

    def _finish_all(self, reason: str) -> None:
        with self._changed:
            for live in self._live.values():
                if live.finish_reason is None:
                    self._finish(live, reason)
            self._rows.clear()
            self._waiting.clear()
            for job in self._jobs:
                job.done.set_exception(RuntimeError(self._closed))
            self._jobs.clear()

    def _finish(self, live: Live, reason: str) -> None:
        live.finish_reason = reason
        live.ended_at = time.monotonic()
        self._ended.append(live.request.key)
        if len(self._ended) == 1:  # one wake-up of the loop for all that end in the same step
            with contextlib.suppress(RuntimeError):  # a closed loop has nobody left to tell
                self._loop.call_soon_threadsafe(self._report_ended)

    def _report_ended(self) -> None:
        with self._changed:
            ended, self._ended = self._ended, []
        for key in ended:
            self._on_finish(key)


def _describe(error: Exception) -> str:
    """One line for people and logs."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error))
