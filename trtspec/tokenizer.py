"""The engine directory's tokenizer: text and chat messages to token ids, and back."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from trtspec.errors import EngineDirError, PromptError


class Tokenizer:
    """A Hugging Face fast tokenizer with its chat template."""

    def __init__(self, directory: Path) -> None:
        """Load from `directory`.

        Raises:
            EngineDirError: there is no fast tokenizer in it.
        """
        # transformers imports heavy optional packages; the rest of trtspec works without waiting for them.
        from transformers import AutoTokenizer

        try:
            self._hf: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise EngineDirError(f"{directory} holds no tokenizer that can be loaded: {error}") from None
        if not self._hf.is_fast:
            raise EngineDirError(
                f"{directory} holds a slow tokenizer; build again with a tokenizer.json in the checkpoint"
            )
        self._backend = self._hf.backend_tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return bool(self._hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of raw text, with or without the tokenizer's own special tokens (such as a BOS)."""
        return list(self._hf(text, add_special_tokens=add_special_tokens)["input_ids"])

    def encode_chat(self, messages: Seq[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            PromptError: there is no chat template, or it refuses the messages.
        """
        if not self.has_chat_template:
            raise PromptError("the tokenizer has no chat template; give raw text (--raw)")
        try:
            text = self._hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes: jinja2's errors, KeyError, its own
            raise PromptError(f"the chat template refuses the messages: {error}") from None
        return list(self._hf(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Seq[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
