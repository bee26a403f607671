"""What a process is doing: the stacks of its threads and asyncio tasks, as text for people. Costs milliseconds, changes nothing."""

import linecache
import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio  # the simulator, which has custom samplers too, loads none of it

FRAMES_MAX = 16  # innermost ones of each stack: what it waits in, and for whom
TEXT_CHARACTERS_MAX = 64_000  # some hundred stacks; a frame of a channel holds a thousand times as much


def of_threads() -> dict[str, list[str]]:
    """Thread -> its frames, innermost last: the main thread, then the others, oldest first; those with the same stack (a pool that
    waits) as one. The thread that asks is left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    alike: dict[tuple[str, ...], list[str]] = {}
    for ident in [*(known for known in names if known in frames), *(ident for ident in frames if ident not in names)]:
        if ident is not None and ident != threading.get_ident():
            stack = tuple(_lines(_outward(frames[ident])))
            alike.setdefault(stack, []).append(names.get(ident, f"thread {ident}"))
    found: dict[str, list[str]] = {}
    for stack, threads in alike.items():
        name = threads[0] if len(threads) == 1 else f"{threads[0]} and {len(threads) - 1} more"
        found[name if name not in found else f"{name} ({len(found)})"] = list(stack)
    return found


def of_thread(ident: int) -> list[str]:
    """Frames of one thread, innermost last; none if it has ended."""
    return _lines(_outward(sys._current_frames().get(ident)))


def of_task(task: "asyncio.Task[Any]") -> list[str]:
    """Frames of what it awaits, innermost last."""
    found: list[FrameType] = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None:
            found.append(frame)
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return _lines(found)


def of_process(tasks: "Iterable[asyncio.Task[Any]]" = ()) -> str:
    """The oldest thread, these tasks, the other threads, as one text of at most `TEXT_CHARACTERS_MAX`."""
    threads = [(f"thread {name}", lines) for name, lines in of_threads().items()]
    stacks = [*threads[:1], *((f"task {task.get_name()}", of_task(task)) for task in tasks if not task.done())]
    stacks += threads[1:]
    text = "\n".join(f"{name}\n" + "\n".join(f"  {line}" for line in lines) for name, lines in stacks)
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[:TEXT_CHARACTERS_MAX] + "\n… cut off here"


def _outward(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < FRAMES_MAX:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _lines(frames: list[FrameType]) -> list[str]:
    return [_line(frame) for frame in frames[-FRAMES_MAX:]]


def _line(frame: FrameType) -> str:
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f"{code.co_filename}:{frame.f_lineno} {code.co_name}: {text}"
