"""What all targets are to the terminal: something that answers lines."""

from typing import Protocol

from laminar.console.place import Reply
from laminar.console.view import Target as Kind


class Target(Protocol):
    """A run to look at."""

    kind: Kind
    title: str
    """What is looked at, for people."""

    def ask(self, line: str) -> Reply:
        """Carry a line out. Raises LaminarError if nobody answers."""

    def look(self) -> Reply:
        """Only where the run is now. Raises LaminarError if nobody answers."""

    def close(self) -> None:
        """Let it go."""
