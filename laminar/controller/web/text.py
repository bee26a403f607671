"""Tokens as text for people, piece by piece, with the tokenizer of the run's model.

The controller has no transformers. The package `tokenizers`, which comes with them, will do; it is looked for when somebody reads a
trajectory, and where it, or the model, is not on this machine token ids are shown, and why.
"""

from pathlib import Path
from typing import Any

from laminar import wire


class Pieces:
    """Of one model. Called from one thread at a time; the first call loads the tokenizer, which takes up to a second."""

    def __init__(self, model: str) -> None:
        """`model`: its directory."""
        self._file = Path(model) / "tokenizer.json"
        self._tokenizer: Any = None
        self._stream: Any = None
        self.why_not = ""
        """Why there is no text; empty = there is."""

    def of(self, tokens: list[int]) -> list[str]:
        """The text that each token adds; a character of several tokens comes with its last one. Ids if there is no text."""
        if self._tokenizer is None and not self.why_not:
            self._load()
        if self._tokenizer is None:
            return [f"{token} " for token in tokens]
        stream = self._stream(skip_special_tokens=False)
        return [self._step(stream, token) for token in tokens]

    def _step(self, stream: Any, token: int) -> str:
        try:
            return stream.step(self._tokenizer, token) or ""
        except Exception:  # noqa: BLE001 - what the library cannot decode in this place, it has no name for
            return str(self._tokenizer.decode([token], skip_special_tokens=False))

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


def of_prompt(prompt: wire.Prompt) -> str:
    """A row of the data set as it is written there."""
    if not prompt.messages:
        return prompt.text
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in prompt.messages)
