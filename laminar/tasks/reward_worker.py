"""A child process that runs the user's reward code: `python -m laminar.tasks.reward_worker <parent pid>`.

Two processes in one group: this one loads the scorer and answers; a supervisor above it has no user code and waits for
either to end, its parent (by signal) or the child, and then kills the whole group. So nothing that user code
started outlives the worker, not even a C call that never gives back the interpreter.

User code sees /dev/null as stdin and the worker's stderr as stdout: prints cannot reach the protocol.
"""

import asyncio
import ctypes
import inspect
import math
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO

from laminar import wire
from laminar.config import TaskConfig
from laminar.errors import ConfigError
from laminar.tasks.reward_wire import HEADER, Answer, Ask, Begun, NotReady, Ready, Setup, pack, to_child

PR_SET_PDEATHSIG = 1
DETAIL_LINES = 8
DETAIL_CHARS = 2000
REWARD_KEYS = ("reward", "score")
"""The entry of a dict that is the reward itself; the others are its parts."""
EXPECTED = 'expected is a finite number, or a dict of finite numbers with "reward" or "score" among them'


def main() -> None:
    parent = int(sys.argv[1])
    child = os.fork()
    if child:
        supervise(parent, child)
    else:
        asyncio.run(serve())


def supervise(parent: int, child: int) -> None:
    """Kill the whole group, this process included, when parent or child is gone."""
    for descriptor in (0, 1):
        os.close(descriptor)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:
        os.waitpid(child, 0)
    os.killpg(0, signal.SIGKILL)


async def serve() -> None:
    """Load the scorer, then answer questions in order of arrival until the pipe closes."""
    questions, answers = take_pipes()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), questions)
    setup = await read(reader)
    assert isinstance(setup, Setup)
    try:
        scorer = load(setup.task)
    except ConfigError as error:  # says all
        write(answers, NotReady(str(error)))
        return
    except (Exception, SystemExit):  # the boundary to user code  # noqa: BLE001
        write(answers, NotReady(last_lines()))
        return
    write(answers, Ready())
    tasks: set[asyncio.Task[None]] = set()
    while True:
        ask = await read(reader)
        assert isinstance(ask, Ask)
        begin(ask, scorer, answers, tasks)
        if tasks:
            await asyncio.sleep(0)


def take_pipes() -> tuple[BinaryIO, int]:
    """Private ends of the protocol's pipes; descriptors 0 and 1 are left for user code."""
    questions, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return os.fdopen(questions, "rb", 0), answers


def load(task: TaskConfig) -> Callable[[wire.Prompt, str], Any]:
    from laminar.tasks.scoring import scorer

    return scorer(task)


async def read(reader: asyncio.StreamReader) -> Setup | Ask:
    try:
        (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return to_child.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        os._exit(0)


def write(descriptor: int, message: Ready | NotReady | Begun | Answer) -> None:
    data = memoryview(pack(message))
    while data:
        data = data[os.write(descriptor, data) :]


def begin(ask: Ask, scorer: Callable[[wire.Prompt, str], Any], answers: int, tasks: set[asyncio.Task[None]]) -> None:
    """Answer at once, or start a task when the scorer is asynchronous."""
    write(answers, Begun(ask.number))
    try:
        value = scorer(ask.prompt, ask.response)
    except (Exception, SystemExit):  # the boundary to user code  # noqa: BLE001
        write(answers, Answer(ask.number, 0.0, {}, "reward_error", last_lines()))
        return
    if inspect.isawaitable(value):
        task = asyncio.ensure_future(finish(ask.number, value, answers))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    else:
        write(answers, judge(ask.number, value))


async def finish(number: int, value: Awaitable[Any], answers: int) -> None:
    try:
        answer = judge(number, await value)
    except (Exception, SystemExit):  # the boundary to user code  # noqa: BLE001
        answer = Answer(number, 0.0, {}, "reward_error", last_lines())
    write(answers, answer)


def judge(number: int, value: Any) -> Answer:
    """A number, or a dict of numbers with `reward` or `score` among them; anything else is `reward_nan`."""
    if not isinstance(value, dict):
        total, parts = to_float(value), {}
    else:
        key = next((key for key in REWARD_KEYS if key in value), None)
        if key is None:
            keys = ", ".join(map(str, value))
            return Answer(number, 0.0, {}, "reward_error", f'the dict has no "reward" or "score", only: {keys}')
        total = to_float(value[key])
        parts = {str(name): to_float(part) for name, part in value.items() if name != key}
    wrong = [repr(name) for name, part in parts.items() if not math.isfinite(part)]
    if wrong or not math.isfinite(total):
        where = f", where {', '.join(wrong)} is no finite number" if wrong else ""
        detail = f"the reward function returned {value!r:.200}{where}; {EXPECTED}"
        return Answer(number, 0.0, {}, "reward_nan", detail)
    return Answer(number, total, parts)


def to_float(value: Any) -> float:
    """NaN for what is not a number; text is not read as one."""
    if isinstance(value, str | bytes):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def last_lines() -> str:
    """The end of the current traceback: where user code failed."""
    return "\n".join(traceback.format_exc().strip().splitlines()[-DETAIL_LINES:])[-DETAIL_CHARS:]


if __name__ == "__main__":
    main()
