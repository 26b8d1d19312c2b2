"""What a caller may give as a prompt, checked and turned into token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from trtspec.errors import PromptError
from trtspec.tokenizer import Tokenizer

Prompt = str | Seq[int] | Seq[Mapping[str, str]]

_ACCEPTED = "a prompt is text, a list of token ids, or a list of chat messages"


def check_prompts(prompts: Any) -> None:
    """Raise PromptError unless this is a list of prompts, rather than a single one."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Seq):
        raise PromptError(f"prompts is a {type(prompts).__name__}; give a list of prompts ({_ACCEPTED})")
    if any(isinstance(prompt, Mapping) for prompt in prompts):
        raise PromptError("prompts holds a chat message; put the messages of one prompt into a list of their own")


def prompt_ids(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    """Token ids of text (as it is), of chat messages (through the chat template), or the ids themselves.

    Raises:
        PromptError: it is none of these, it is empty, or the chat template refuses it.
    """
    if isinstance(prompt, str):
        ids = tokenizer.encode(_valid_text(prompt)) if prompt else []
    elif isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__len__"):
        raise PromptError(f"a prompt is a {type(prompt).__name__}; {_ACCEPTED}")
    elif len(prompt) and isinstance(prompt[0], Mapping):
        ids = tokenizer.encode_chat([_message(number, message) for number, message in enumerate(prompt)])
    else:
        ids = [_token_id(token) for token in prompt]
    if not ids:
        raise PromptError("the prompt is empty; give at least one token")
    return ids


def _message(number: int, message: Any) -> Mapping[str, str]:
    if not isinstance(message, Mapping):
        raise PromptError(f"message {number} is a {type(message).__name__}; expected an object with role and content")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise PromptError(f"message {number} has no text as its {key}; only text is supported")
        _valid_text(message[key])
    return message


def _token_id(token: Any) -> int:
    if isinstance(token, bool):
        raise PromptError(f"{token} is no token id; {_ACCEPTED}")
    try:
        return operator.index(token)
    except TypeError:
        raise PromptError(f"{token!r} is no token id; {_ACCEPTED}") from None


def _valid_text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is no valid Unicode text (character {error.start}); give UTF-8") from None
    return text
