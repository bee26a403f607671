"""Rows through TransferQueue's client, in its own environment: `transferqueue_rows.py SERVER_CORE CLIENT_CORE SECONDS MEAN_TOKENS`.

TransferQueue's default configuration: its controller and two storage units in memory, as Ray actors; nothing is on disk. All of its
processes are pinned to one core; this one, the client, to another. Two kinds of work, each for SECONDS:

* `groups`: a group's 8 complete rows of MEAN_TOKENS tokens per put, as a rollout would when a group is complete; as soon as there
  are BATCH_GROUPS of them, a trainer gets the batch and clears it. This is what TransferQueue is made for.
* `reports`: 104 rows of 10 tokens per put, each under a key of its own, as Laminar's replicas report what they have so far.

A row has tokens (i32), log-probs (f32) and sources (u8). Prints one JSON object per kind.
"""

import asyncio
import itertools
import json
import os
import sys
import time
import warnings

import psutil
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

PARTITION = "train"
LATE_S = 60.0  # for puts that wait for the batch that is being fetched
AT_ONCE = 8  # puts under way: more were not faster
BATCH_GROUPS = 512
GROUP_SIZE = 8
REPORT_ROWS, REPORT_TOKENS = 104, 10


def rows(num_rows: int, num_tokens: int) -> TensorDict:
    """Random rows, tensors of shape (num_rows, num_tokens)."""
    shape = (num_rows, num_tokens)
    return TensorDict(
        {
            "tokens": torch.randint(0, 150_000, shape, dtype=torch.int32),
            "logprobs": -torch.rand(shape),
            "sources": torch.zeros(shape, dtype=torch.uint8),
        },
        batch_size=num_rows,
    )


class Work:
    """Puts from AT_ONCE tasks, and one that gets and clears what is complete."""

    def __init__(self, kind: str, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.kind, self._num_tokens, self._seconds = kind, num_tokens, seconds
        self._rows = rows(num_rows, num_tokens)
        self._numbers = itertools.count()
        self._complete: asyncio.Queue[list[str]] = asyncio.Queue(4 * BATCH_GROUPS)
        self.num_put = self.num_got = 0

    async def run(self) -> None:
        """For as long as asked."""
        self._deadline = time.monotonic() + self._seconds
        putting = asyncio.gather(*(self._put() for _ in range(AT_ONCE)))
        getting = asyncio.create_task(self._get())
        async with asyncio.timeout(self._seconds + LATE_S):
            await asyncio.wait([putting, getting], return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            getting.result()  # raises: it never ends by itself
        await putting
        getting.cancel()
        await asyncio.gather(getting, return_exceptions=True)

    async def _put(self) -> None:
        while time.monotonic() < self._deadline:
            number = next(self._numbers)
            keys = [f"{self.kind}-{number}-{row}" for row in range(len(self._rows))]
            await tq.async_kv_batch_put(keys=keys, partition_id=PARTITION, fields=self._rows)
            self.num_put += len(keys)
            await self._complete.put(keys)

    async def _get(self) -> None:
        num_rows = BATCH_GROUPS * GROUP_SIZE
        while True:
            keys: list[str] = []
            while len(keys) < num_rows:
                keys += await self._complete.get()
            found = await tq.async_kv_batch_get(keys=keys, partition_id=PARTITION)
            tokens = found["tokens"]
            assert (tokens.values() if tokens.is_nested else tokens).numel() == len(keys) * self._num_tokens, found
            self.num_got += len(keys)
            await tq.async_kv_clear(keys=keys, partition_id=PARTITION)


def servers_cpu_s() -> float:
    """Processor time of everything that Ray has started, seconds."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


async def measure(kind: str, num_rows: int, num_tokens: int, seconds: float) -> None:
    """Run one kind of work and print what came of it."""
    await Work(kind, num_rows, num_tokens, 2.0).run()
    work = Work(f"{kind}-again", num_rows, num_tokens, seconds)
    servers, client, began = servers_cpu_s(), time.process_time(), time.monotonic()
    await work.run()
    elapsed = time.monotonic() - began
    found = {
        "kind": kind,
        "seconds": elapsed,
        "rows_per_s": work.num_put / elapsed,
        "tokens_put": work.num_put * num_tokens,
        "tokens_got": work.num_got * num_tokens,
        "servers_cpu_s": servers_cpu_s() - servers,
        "client_cpu_s": time.process_time() - client,
        "version": tq.__version__,
    }
    print(json.dumps(found), flush=True)


def main() -> None:
    """The command line is that of the docstring."""
    server_core, client_core, seconds, mean_tokens = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        float(sys.argv[3]),
        int(sys.argv[4]),
    )
    warnings.filterwarnings("ignore")
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default its actors give way to everything else
    os.sched_setaffinity(0, {server_core})  # before Ray: what it starts inherits it
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tq.init()
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {client_core})
    torch.set_num_threads(1)
    asyncio.run(measure("groups", GROUP_SIZE, mean_tokens, seconds))
    asyncio.run(measure("reports", REPORT_ROWS, REPORT_TOKENS, seconds))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
