"""Tokens as text for people, piece by piece, with the tokenizer of the run's model.

The controller has no transformers. The package `tokenizers`, which comes with them, will do; it is looked for when somebody reads a
trajectory, and where it, or the model, is not on this machine token ids are shown, and why.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laminar import wire

BEFORE = 8  # tokens whose text is known already: enough for a character that they begin, and for a word's space
WAITING_MAX = 8  # tokens that add nothing: UTF-8 has at most four bytes a character, so these will never be one


class Pieces:
    """Of one model. Called from one thread at a time; the first call loads the tokenizer, which takes up to a second."""

    def __init__(self, model: str) -> None:
        """`model`: its directory."""
        self._file = Path(model) / "tokenizer.json"
        self._tokenizer: Any = None
        self._stream: Any = None
        self.why_not = ""
        """Why there is no text; empty = there is."""

    def of(self, tokens: Sequence[int], first: int = 0, last: int | None = None) -> list[str]:
        """The text that each of ``tokens[first:last]`` adds to those before it. Ids if there is no text.

        A character of several tokens comes with its last one; bytes that are no character, at the latest with the last of all, as
        U+FFFD.
        """
        shown = tokens[first:last]
        if self._tokenizer is None and not self.why_not:
            self._load()
        if self._tokenizer is None:
            return [f"{token} " for token in shown]
        reader = _Reader(self._tokenizer, self._stream)
        for token in tokens[max(0, first - BEFORE) : first]:
            reader.read(token)
        pieces = [reader.read(token) for token in shown]
        if pieces and first + len(shown) == len(tokens):
            pieces[-1] += reader.rest()
        return pieces

    def _load(self) -> None:
        if not self._file.is_file():
            self.why_not = f"there is no {self._file} on the controller's machine, so token ids are shown"
            return
        try:
            from tokenizers import Tokenizer
            from tokenizers.decoders import DecodeStream

            self._tokenizer, self._stream = Tokenizer.from_file(str(self._file)), DecodeStream
        except ImportError:
            self.why_not = "token ids are shown: text needs `pip install tokenizers` on the controller's machine"
        except Exception as error:  # noqa: BLE001 - the library raises nothing more precise
            self.why_not = f"token ids are shown: {self._file} cannot be read: {error}"


class _Reader:
    """One text, token by token."""

    def __init__(self, tokenizer: Any, stream: Any) -> None:
        self._tokenizer, self._stream_of = tokenizer, stream
        self._waiting: list[int] = []
        """Tokens whose text has not come yet."""
        self._stream = stream(skip_special_tokens=False)

    def read(self, token: int) -> str:
        """What there is to say now."""
        self._waiting.append(token)
        try:
            piece: str | None = self._stream.step(self._tokenizer, token)
        except Exception:  # noqa: BLE001 - what the library cannot decode in this place, it has no name for
            return self.rest()
        if piece:
            self._waiting.clear()
            return piece
        return self.rest() if len(self._waiting) >= WAITING_MAX else ""

    def rest(self) -> str:
        """What still waits, as it is; what follows is read anew."""
        waiting, self._waiting = self._waiting, []
        self._stream = self._stream_of(skip_special_tokens=False)
        return str(self._tokenizer.decode(waiting, skip_special_tokens=False)) if waiting else ""


def of_prompt(prompt: wire.Prompt) -> str:
    """A row of the data set as it is written there."""
    if not prompt.messages:
        return prompt.text
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in prompt.messages)
