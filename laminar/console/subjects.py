"""From what people type to what it names: `r3` is `rollout-3`, `g7` is `g1.7`, `t42`, `v12`, `s12`, `relay-0`.

Names are those of `laminar.core.story`; a short form is accepted if it can mean one thing only. What names nothing is answered by
what there is.
"""

import difflib
import re
from collections.abc import Iterable, Sequence

from laminar.console.view import View
from laminar.core import story
from laminar.core.records import Group, Replica, Trajectory
from laminar.errors import ConfigError
from laminar.ids import BOOT_SHIFT, GroupId, TrajectoryId, Version, WorkerId, format_id, make_id

SHOWN_MAX = 8  # of the names that there are, in an error
_NUMBERED = re.compile(r"([gt])(?:(\d+)\.)?(\d+)")


class UnknownSubject(ConfigError):
    """What was named is not there."""


def listed(names: Sequence[str]) -> str:
    """Names for an error, not too many of them."""
    if len(names) <= SHOWN_MAX:
        return ", ".join(names) or "none"
    return f"{', '.join(names[: SHOWN_MAX - 1])} … {names[-1]} ({len(names)})"


def nearest(word: str, names: Iterable[str]) -> str:
    """`; did you mean …?` if some name is near."""
    near = difflib.get_close_matches(word, list(names), 1)
    return f"; did you mean {near[0]}?" if near else ""


def replica(view: View, text: str) -> Replica:
    """A replica by its name or short form. Raises UnknownSubject."""
    return view.state.replicas[worker(view, text, list(view.state.replicas), "replica")]


def written(view: View, word: str) -> str:
    """The whole name of the worker that a word is the short form of; other words as they are."""
    try:
        return worker(view, word, [WorkerId(name) for name in workers(view)], "worker")
    except UnknownSubject:
        return word


def worker(view: View, text: str, names: Sequence[WorkerId], kind: str) -> WorkerId:
    """The one of `names` that is meant: as written, or `r3` for the only one that ends in `-3`, replicas
    first. Raises UnknownSubject."""
    if text in names:
        return WorkerId(text)
    short = re.fullmatch(r"[a-z](\d+)", text)
    meant = [name for name in names if short and name[0] == text[0] and name.rpartition("-")[2] == short[1]]
    meant = [name for name in meant if name in view.state.replicas] or meant
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise UnknownSubject(f"{text} may be {' or '.join(meant)}: write the whole name")
    raise UnknownSubject(f"there is no {kind} {text!r}{nearest(text, names)}; there are: {listed(names)}")


def group(view: View, text: str) -> Group:
    """A group that is in flight, buffered or leased. Raises UnknownSubject."""
    return view.state.groups[GroupId(_numbered(view, text, "g", list(view.state.groups)))]


def trajectory(view: View, text: str) -> Trajectory:
    """A trajectory that the core still has a record of. Raises UnknownSubject."""
    return view.state.trajectories[TrajectoryId(_numbered(view, text, "t", list(view.state.trajectories)))]


def _numbered(view: View, text: str, letter: str, known: Sequence[int]) -> int:
    """The id that is meant, of those known. Raises UnknownSubject."""
    kind = {"g": "group", "t": "trajectory"}[letter]
    parts = _NUMBERED.fullmatch(text)
    if parts is None or parts[1] != letter:
        example = f"{letter}{format_id(known[-1])}" if known else f"{letter}1.7"
        raise UnknownSubject(f"{text!r} names no {kind}: write, for example, {example}")
    meant = _meant(parts, known)
    if meant is None:
        names = [f"{letter}{format_id(value)}" for value in known]
        gone = f"it may be gone (trained and committed, or dropped): `story {text}` says what is known of it"
        raise UnknownSubject(f"there is no {kind} {text} now; {gone}; there are: {listed(names)}")
    return meant


def _meant(parts: re.Match[str], known: Iterable[int]) -> int | None:
    boot, number = parts[2], int(parts[3])
    if boot is not None:
        return next((value for value in known if value == make_id(int(boot), number)), None)
    mask = (1 << BOOT_SHIFT) - 1
    return max((value for value in known if value & mask == number), default=None)


def version(view: View, text: str) -> Version:
    """A weight version that is remembered; `v12` also means the newest branch of step 12. Raises UnknownSubject."""
    names = [str(record.version) for record in view.state.versions]
    try:
        asked = Version.parse(text)
    except ValueError:
        raise UnknownSubject(
            f"{text!r} names no version: write, for example, v12; there are: {listed(names)}"
        ) from None
    found = [r.version for r in view.state.versions if r.version == asked]
    found = found or [r.version for r in view.state.versions if r.version.step == asked.step and "b" not in text]
    if not found:
        raise UnknownSubject(f"there is no version {text}; there are: {listed(names)}")
    return found[-1]


def told_of(view: View, text: str) -> list[str]:
    """The subjects in whose stories a word is looked up, the present ones first: also what is gone may have a story.

    Raises UnknownSubject for what can name nothing.
    """
    if (parts := _NUMBERED.fullmatch(text)) is not None:
        return _numbered_subjects(view, parts)
    if re.fullmatch(r"s\d+", text):
        return [text]
    if re.fullmatch(r"v\d+(\.b\d+)?", text):
        branches = [str(r.version) for r in view.state.versions if r.version.step == Version.parse(text).step]
        return list(dict.fromkeys([text, *(branches if "b" not in text else [])]))
    if text == story.SETTINGS or (text not in workers(view) and view.core.story.of(text)):
        return [text]  # the latter: a worker that was given up
    return [worker(view, text, list(map(WorkerId, workers(view))), "subject")]


def _numbered_subjects(view: View, parts: re.Match[str]) -> list[str]:
    """A trajectory's story is also that of its group, as long as it is known."""
    known = view.state.groups if parts[1] == "g" else view.state.trajectories
    value = _meant(parts, known)
    if value is None:
        return [f"{parts[1]}{parts[2] or view.state.boot}.{parts[3]}"]
    subject = f"{parts[1]}{format_id(value)}"
    if parts[1] == "g":
        return [subject]
    return [subject, story.group(view.state.trajectories[TrajectoryId(value)].group)]


def workers(view: View) -> list[str]:
    """Every worker that there is, or was and may come back."""
    state = view.state
    lost = [name for name in state.restarts if name not in state.replicas]
    return [*state.replicas, *state.relays, *state.trainer.ranks, *lost]
