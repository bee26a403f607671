"""What all commands do alike with their arguments: whatever is not understood is one line that says what to type instead."""

import argparse
import difflib
from typing import NoReturn

EXIT_USAGE = 2


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
