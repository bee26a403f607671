"""Look at what happened: the story of one subject, and the timeline of all."""

import re
from itertools import groupby

from laminar.console import subjects
from laminar.console.answers import Answer, Cell, Table, table
from laminar.console.language import Command, num_rows
from laminar.console.view import View
from laminar.core.records import Trajectory
from laminar.core.story import Row
from laminar.ids import TrajectoryId, format_id

ROWS = 40  # a screen
SUBJECTS_SHOWN = 3  # of a row; the siblings of a group are many
SEARCHED_MAX = 20_000  # rows; some 10 ms, in which a live controller does nothing else


def show_story(view: View, words: list[str]) -> Answer:
    """All that happened to one subject, and why."""
    asked = subjects.told_of(view, words[0])
    found = sorted(_of_any(view, asked), key=lambda row: row.cause)
    record = _record(view, asked[0])
    lines = [] if found else [f"nothing is told of {asked[0]}: {_why_untold(view)}"]
    note = f"`story {words[0]} all`"
    tables = [rows(view, found, rows_max=num_rows(words[1:], ROWS), title=asked[0], note=note)] if found else []
    return Answer(facts=_milestones(view, record) if record else {}, tables=tables, lines=lines)


def _of_any(view: View, asked: list[str]) -> list[Row]:
    """Rows that name any of them, each once; what is told of the siblings of a trajectory is not told of it."""
    told = {id(row): row for subject in asked for row in view.core.story.of(subject)}
    if not _is_trajectory(asked[0]):
        return list(told.values())
    return [row for row in told.values() if asked[0] in row.subjects or not any(map(_is_trajectory, row.subjects))]


def _is_trajectory(subject: str) -> bool:
    return subject[0] == "t" and subject[1:2].isdigit()


def _why_untold(view: View) -> str:
    if view.target == "live":
        return "it does not exist, or it was before this controller began to tell (`--log run.db` reads all of the log)"
    return "it does not exist, or not yet"


def _record(view: View, subject: str) -> Trajectory | None:
    if not _is_trajectory(subject):
        return None
    return next((t for t in view.state.trajectories.values() if f"t{format_id(t.id)}" == subject), None)


def _milestones(view: View, record: Trajectory) -> dict[str, Cell]:
    """When what happened to a trajectory: seconds since the run began."""
    timings = record.timings
    moments = {name: getattr(timings, name) for name in timings.__struct_fields__}
    reached: dict[str, Cell] = {f"{name}_s": view.run_s(at) for name, at in moments.items() if at}
    return {
        "trajectory": f"t{format_id(TrajectoryId(record.id))} of g{format_id(record.group)}, attempt {record.attempt}",
        "state": str(record.state),
        "version": str(record.behavior_version or "–"),
        **reached,
    }


def show_timeline(view: View, words: list[str]) -> Answer:
    """What happened last, to all."""
    wanted = [subjects.written(view, word) for word in words if not word.isdecimal()]
    rows_max = num_rows([word for word in words if word.isdecimal()], ROWS)
    latest = view.core.story.latest(SEARCHED_MAX if wanted else rows_max)
    found = [row for row in latest if _says(row, wanted)]
    if not found:
        what = f"nothing with {' and '.join(map(repr, wanted))} in it" if wanted else "nothing"
        return Answer(lines=[f"{what} has happened lately"])
    return Answer(tables=[rows(view, found, rows_max=rows_max, title="timeline")])


def _says(row: Row, wanted: list[str]) -> bool:
    return all(word in row.subjects or _has(row.text, word) or _has(row.because, word) for word in wanted)


def _has(text: str, word: str) -> bool:
    """`v12` does not have `v1` in it."""
    return word in text and (not word[-1:].isdigit() or re.search(re.escape(word) + r"(?!\d)", text) is not None)


def rows(view: View, found: list[Row], *, rows_max: int, title: str = "story", note: str = "") -> Table:
    """The last rows, oldest first; rows in a row that say the same of one event are one."""
    alike = [list(rows) for _, rows in groupby(found, key=lambda row: (row.cause, row.text.lstrip("0123456789 ")))]
    shown: list[list[Cell]] = [
        [view.run_s(rows[0].at), rows[0].cause, rows[0].because, _subjects(rows[0]), _text(rows)]
        for rows in alike[-rows_max:]
    ]
    left_off = sum(map(len, alike[: len(alike) - len(shown)]))
    return table(title, "run_s event because_of subjects what", shown, left_off=left_off, note=note if left_off else "")


def _text(alike: list[Row]) -> str:
    """What they say; how many like it."""
    more = len(alike) - 1
    return f"{alike[0].text}; the same of {more} more" if more else alike[0].text


def _subjects(row: Row) -> str:
    more = len(row.subjects) - SUBJECTS_SHOWN
    return " ".join(row.subjects[:SUBJECTS_SHOWN]) + (f" +{more}" if more > 0 else "")


COMMANDS = (
    Command(
        name="story",
        part="Look",
        usage="story SUBJECT [ROWS | all]",
        summary="every event and decision that touched a trajectory, group, replica, version or step, with its cause",
        function=show_story,
        arguments=(1, 2),
        takes="SUBJECT",
        examples=(
            ("story t42", "a trajectory, and the group it is of"),
            ("story g1.7", "a group of boot 1"),
            ("story r3", "the replica rollout-3"),
            ("story v12", "a weight version"),
            ("story s12 200", "a train step, up to 200 rows"),
            ("story settings", "what an operator changed of the run"),
        ),
        details="`event` is the sequence number of the event that led to the row, `because of` what it was.",
    ),
    Command(
        name="timeline",
        part="Look",
        usage="timeline [ROWS] [WORD …]",
        summary="what happened last, to all of them",
        function=show_timeline,
        arguments=(0, 6),
        takes="SUBJECT",
        examples=(
            ("timeline", f"the last {ROWS} rows"),
            ("timeline 100 'pulls v12'", "the last 100 rows that say so"),
            ("timeline r3 move", "those about rollout-3 that say `move`"),
        ),
        details=f"Words choose rows of the last {SEARCHED_MAX:,} that contain all of them.",
    ),
)
