"""Prompts to tokens and responses to text, with the model's own tokenizer."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

from laminar import wire
from laminar.errors import LaminarError, StartError
from laminar.ids import GroupId

GROUPS_CACHED_MAX = 1024  # retries of a group come soon after its first assignment


class PromptError(LaminarError):
    """A prompt that cannot be encoded: the data's fault."""


class TextCodec:
    """The tokenizer of the model directory `path`. Raises StartError when there is none. Blocks for seconds."""

    def __init__(self, path: str) -> None:
        if not Path(path).is_dir():
            raise StartError(
                f"model.path = {path!r} is no directory on this host; copy the model there or fix the path"
            )
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError) as error:
            raise StartError(f"model.path = {path!r} has no usable tokenizer: {error}") from error
        self.stop_ids = _stop_ids(Path(path), self._tokenizer.eos_token_id)
        """Tokens after which a response ends: the tokenizer's and those of generation_config.json."""
        self._cached: OrderedDict[GroupId, list[int]] = OrderedDict()

    def encode_group(self, group: GroupId, prompt: wire.Prompt) -> list[int]:
        """As `encode`, remembered for the group's retries."""
        if group not in self._cached:
            self._cached[group] = self.encode(prompt)
            while len(self._cached) > GROUPS_CACHED_MAX:
                self._cached.popitem(last=False)
        return self._cached[group]

    def encode(self, prompt: wire.Prompt) -> list[int]:
        """Prompt tokens. Raises PromptError when the chat template or the tokenizer refuses it, or nothing is left."""
        try:
            tokens = self._encode(prompt)
        except Exception as error:  # chat templates are code and may raise anything
            raise PromptError(f"prompt {prompt.prompt} cannot be encoded: {type(error).__name__}: {error}") from error
        if not tokens:
            raise PromptError(f"prompt {prompt.prompt} has no tokens")
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text that rewards and people see: without special tokens."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def decode_all(self, tokens: list[int]) -> str:
        """Their text with special tokens."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Chat messages as text, up to where an answer begins. Raises PromptError when there is no template, or it refuses."""
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # chat templates are code and may raise anything
            raise PromptError(f"the messages cannot be rendered: {type(error).__name__}: {error}") from error
        return text

    def encode_text(self, text: str, *, special: bool) -> list[int]:
        """Tokens of a text; `special`: with what the tokenizer puts around a text of its own, such as a first token."""
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _encode(self, prompt: wire.Prompt) -> list[int]:
        if not prompt.messages:
            return self.encode_text(prompt.text, special=True)
        return self.encode_text(self.render(prompt.messages), special=False)


def _stop_ids(path: Path, eos_token_id: int | None) -> tuple[int, ...]:
    ids = [] if eos_token_id is None else [eos_token_id]
    file = path / "generation_config.json"
    if file.is_file():
        listed = json.loads(file.read_text()).get("eos_token_id")
        ids += listed if isinstance(listed, list) else [listed] if isinstance(listed, int) else []
    return tuple(dict.fromkeys(ids))
