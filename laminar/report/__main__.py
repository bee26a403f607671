"""`python -m laminar.report`: one run as one HTML file."""

import os
import sys
from pathlib import Path

from laminar.commandline import Parser
from laminar.controller import rundir
from laminar.errors import LaminarError
from laminar.replay.recording import Recording
from laminar.report import facts, page

EPILOG = """\
examples:
  python -m laminar.report                           # the latest run in runs/
  python -m laminar.report runs/my-run -o my-run.html

The file needs nothing else: it can be mailed, kept, and opened without a network. The run may be going on.
"""


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 = written, 2 = wrong input."""
    parser = Parser(
        prog="python -m laminar.report",
        description="Write one HTML file with the plots and tables of a run.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "run", nargs="?", type=Path, help="a run's directory, or its run.db (default: the latest in runs/)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: report.html beside run.db")
    options = parser.parse_args(arguments)
    try:
        with Recording(options.run or rundir.latest(Path("runs"))) as recording:
            path = options.output or recording.path.parent / "report.html"
            text = page.page(facts.read(recording))
        _write(path, text)
    except LaminarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write {options.output or 'the report'}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"{path}: {len(text.encode()) / 1024:,.0f} KiB")
    return 0


def _write(path: Path, text: str) -> None:
    """It is complete or not there."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
