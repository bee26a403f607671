"""What all commands do alike: whatever is not understood is one line that says what to type instead; the same exit codes."""

import argparse
import difflib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from laminar.errors import LaminarError

EXIT_OK, EXIT_USAGE, EXIT_INTERRUPTED = 0, 2, 130


class Parser(argparse.ArgumentParser):
    """Without abbreviations, which would change their meaning with the next option; `epilog` is printed as it is."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """One line, without the usage of all options."""
        self.exit(EXIT_USAGE, f"error: {message}{self._nearest(message)}; --help has examples\n")

    def _nearest(self, message: str) -> str:
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0].partition("=")[0]
        near = difflib.get_close_matches(unknown, self._option_string_actions, 1)
        return f"; did you mean {near[0]}?" if near else ""


def exit_code_of(work: Callable[[], int]) -> int:
    """Of what the work returns, or of why it ended early."""
    try:
        return work()
    except LaminarError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # … | head
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the interpreter flushes it at exit
        return EXIT_OK
