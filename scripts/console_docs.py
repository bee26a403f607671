"""The console's outputs in the docs, made again: `python scripts/console_docs.py [--write]`.

A block of `PAGES` that begins with `$ python -m laminar.console --sim …` shows all that this command prints in `WIDTH` columns; a
block that begins with `> ` goes on where the one before ended. A simulated run is the same wherever it is simulated, so
a difference is a change of Laminar. Differences are printed (exit code 1), or written into the pages.
"""

import argparse
import contextlib
import difflib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from laminar.console.__main__ import main as console  # noqa: E402 - the repository need not be installed

PAGES = ("docs/console.md", "docs/debugging.md")
WIDTH = 120
BEGIN = "$ python -m laminar.console --sim "
_BLOCK = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TYPED = re.compile(r"\$ ((?:.*\\\n)*.*)\n")
_COMMAND = re.compile(r"^(?=> )", re.MULTILINE)


class Transcript(NamedTuple):
    """One command of a page, and what the page says that it prints."""

    page: str
    command: str
    blocks: list[tuple[int, int]]
    """Where the parts of its output are in the page's text."""

    def shown(self, text: str) -> str:
        """In the page."""
        return "".join(text[begin:end] for begin, end in self.blocks)

    def parted(self, text: str, output: str) -> Iterator[str]:
        """The output for each block: as many commands as it shows now, the last one the rest."""
        parts = [part.rstrip() + "\n" for part in _COMMAND.split(output) if part]
        for begin, end in self.blocks[:-1]:
            num = len(_COMMAND.findall(text[begin:end]))
            yield "".join(parts[:num])
            del parts[:num]
        yield "".join(parts)


def transcripts(page: str, text: str) -> list[Transcript]:
    """All of a page."""
    found: list[Transcript] = []
    goes_on = False
    for block in _BLOCK.finditer(text):
        begin, end = block.span(1)
        if text.startswith("> ", begin):
            if goes_on:
                found[-1].blocks.append((begin, end))
            continue
        goes_on = text.startswith(BEGIN, begin)
        if goes_on:
            command = _TYPED.match(text, begin)
            assert command is not None
            typed = command[1].replace("\\\n", "")
            found.append(Transcript(page, typed, [(command.end(), end)]))
    return found


def printed(command: str) -> str:
    """What the command prints."""
    output = io.StringIO()
    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), str(WIDTH)
    try:
        with contextlib.redirect_stdout(output):
            console(shlex.split(command.removeprefix("python -m laminar.console ")))
    finally:
        del os.environ["COLUMNS"]
        os.environ |= {"COLUMNS": columns} if columns else {}
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def differences(transcript: Transcript, text: str, output: str) -> list[str]:
    """Lines of a diff; empty = the page shows what is printed."""
    made = "".join(transcript.parted(text, output))
    shown = transcript.shown(text)
    return list(
        difflib.unified_diff(shown.splitlines(), made.splitlines(), transcript.page, transcript.command, lineterm="")
    )


def main() -> int:
    """0 = the pages show what is printed, or do now."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write what is printed into the pages")
    options = parser.parse_args()
    differ = False
    for page in PAGES:
        text = (ROOT / page).read_text()
        for transcript in reversed(transcripts(page, text)):  # the last first: what is written moves what follows
            output = printed(transcript.command)
            if lines := differences(transcript, text, output):
                differ = True
                print(*lines, sep="\n")
                text = written(transcript, text, output)
        if options.write:
            (ROOT / page).write_text(text)
    return 1 if differ and not options.write else 0


def written(transcript: Transcript, text: str, output: str) -> str:
    """The page with the output in the place of what it shows."""
    parts = list(transcript.parted(text, output))
    for (begin, end), part in reversed(list(zip(transcript.blocks, parts, strict=True))):
        text = text[:begin] + part + text[end:]
    return text


if __name__ == "__main__":
    sys.exit(main())
