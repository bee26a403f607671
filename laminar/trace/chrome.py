"""A timeline in Chrome's trace event format (JSON), which Perfetto reads: https://perfetto.dev/docs/getting-started/other-formats.

Times are whole microseconds after the run's start: fractions would make slices that follow one another overlap.
"""

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from laminar.trace.timeline import Arrow, Instant, Lane, Slice, Timeline, nested

Event = dict[str, Any]
LANES = ("train", "publish", "checkpoint", "decode", "pull", "repack", "reward", "alarms", "events")
"""From the top of a process to its bottom."""


class Trace:
    """Times in it are after `origin`: the run's start, seconds since the epoch, unless something began before by its own clock."""

    def __init__(self, timeline: Timeline, start: float) -> None:
        self._timeline = timeline
        self.origin = min([start, *(s.start for s in timeline.slices), *(o.start for o in timeline.overlapping)])
        """Perfetto drops what is before 0."""
        self._pids = {process: number for number, process in enumerate(timeline.processes, 1)}
        lanes = [s.lane for s in timeline.slices] + [i.lane for i in timeline.instants]
        ordered = sorted(dict.fromkeys(lanes), key=lambda lane: (self._pids[lane.process], _place(lane.name)))
        self._tids = {lane: number for number, lane in enumerate(ordered, 1000)}
        """Unique in the whole trace: Perfetto takes a thread that is seen in another process for a new one."""
        self._ends: dict[tuple[Lane, str, float], list[tuple[int, Arrow, Event]]] = {}
        for number, arrow in enumerate(timeline.arrows, 1):
            self._ends.setdefault(_key(arrow.source), []).append((number, arrow, {"ph": "s"}))
            self._ends.setdefault(_key(arrow.target), []).append((number, arrow, {"ph": "f", "bp": "e"}))

    def events(self) -> Iterator[Event]:
        """In the order in which a reader needs them: an arrow right after the slice that it begins or ends at."""
        yield from self._names()
        yield from self._slices()
        for each in self._timeline.overlapping:
            common = {
                "cat": each.lane.name,
                "id2": {"local": each.id},
                "pid": self._pids[each.lane.process],
                "name": each.name,
            }
            yield {"ph": "b", "ts": self._us(each.start), **common, "args": each.args}
            yield {"ph": "e", "ts": self._us(each.end), **common}
        for instant in self._timeline.instants:
            yield self._instant(instant)
        for level in self._timeline.levels:
            yield {
                "ph": "C",
                "name": level.name,
                "pid": self._pids[level.process],
                "ts": self._us(level.at),
                "args": level.values,
            }

    def _names(self) -> Iterator[Event]:
        for process, pid in self._pids.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for lane, tid in self._tids.items():
            ids = {"pid": self._pids[lane.process], "tid": tid}
            yield {"ph": "M", "name": "thread_name", **ids, "args": {"name": lane.name}}
            yield {"ph": "M", "name": "thread_sort_index", **ids, "args": {"sort_index": _place(lane.name)}}

    def _slices(self) -> Iterator[Event]:
        by_lane: dict[Lane, list[Slice]] = {lane: [] for lane in self._tids}
        for each in self._timeline.slices:
            by_lane[each.lane].append(each)
        for lane, slices in by_lane.items():
            times = [(self._us(each.start), self._us(each.end)) for each in slices]
            for place, start, end in nested(times):
                each = slices[place]
                ids = {"pid": self._pids[lane.process], "tid": self._tids[lane]}
                yield {
                    "ph": "X",
                    "cat": lane.name,
                    "name": each.name,
                    "ts": start,
                    "dur": end - start,
                    **ids,
                    "args": each.args,
                }
                yield from self._arrows(each, start, ids)

    def _arrows(self, at: Slice, start: int, ids: Event) -> Iterator[Event]:
        for number, arrow, end in self._ends.get(_key(at), ()):
            yield {**end, "cat": arrow.name, "name": arrow.name, "id": number, "ts": start, **ids}

    def _instant(self, instant: Instant) -> Event:
        ids = {"pid": self._pids[instant.lane.process], "tid": self._tids[instant.lane]}
        at = self._us(instant.at)
        return {
            "ph": "i",
            "s": "t",
            "cat": instant.lane.name,
            "name": instant.name,
            "ts": at,
            **ids,
            "args": instant.args,
        }

    def _us(self, at: float) -> int:
        return round((at - self.origin) * 1e6)


def _place(lane: str) -> int:
    return LANES.index(lane) if lane in LANES else len(LANES)


def _key(of: Slice) -> tuple[Lane, str, float]:
    """What stays of a slice when it is made to begin later."""
    return of.lane, of.name, of.end


def write(path: Path, trace: Trace, about: dict[str, Any]) -> int:
    """The number of events. `path` is complete or not there; gzip if it ends in .gz. Raises OSError."""
    new = path.with_name(path.name + ".new")
    try:
        with gzip.open(new, "wb", 6) if path.suffix == ".gz" else new.open("wb") as file:
            num = _write(file, trace, about)  # type: ignore[arg-type]
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    return num


def _write(file: BinaryIO, trace: Trace, about: dict[str, Any]) -> int:
    encode = msgspec.json.Encoder().encode
    num = 0
    file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(about) + b',"traceEvents":[\n')
    for num, event in enumerate(trace.events(), 1):
        file.write((b",\n" if num > 1 else b"") + encode(event))
    file.write(b"\n]}\n")
    return num
