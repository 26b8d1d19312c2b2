"""Prompt sets for benchmarks: built-in ones and JSONL files of the common shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from trtspec.errors import PromptError

BUILT_IN = ("edit", "chat", "mixed", "code")
_PROMPT_KEYS = ("turns", "messages", "prompt")


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt: either `messages` for the chat template, up to the first user turn, or raw `text`."""

    id: str
    messages: tuple[dict[str, str], ...] | None
    text: str | None


def load_dataset(name_or_path: str, limit: int | None = None) -> list[BenchPrompt]:
    """Read a built-in set by its name, or a JSONL file, whose lines hold `turns`, `messages` or `prompt`.

    A conversation is cut after its first user turn. With a limit, lines beyond it are not read.

    Raises:
        PromptError: the limit is below 1, there is no such file, or a line of it cannot be used.
    """
    if limit is not None and limit < 1:
        raise PromptError(f"a limit of {limit} prompts leaves none; give 1 or more")
    label, data = _read(name_or_path)
    prompts = list(islice(_parse_lines(data, label), limit))
    if not prompts:
        raise PromptError(f"{label}:1: the file is empty; expected one JSON object a line")
    return prompts


def _read(name_or_path: str) -> tuple[str, bytes]:
    """The file's name for messages, and its bytes."""
    if name_or_path in BUILT_IN:
        file = resources.files(__package__) / "data" / f"{name_or_path}.jsonl"
        return file.name, file.read_bytes()
    try:
        return name_or_path, Path(name_or_path).read_bytes()
    except FileNotFoundError as error:
        built_in = ", ".join(BUILT_IN)
        raise PromptError(f"{name_or_path}: no such file, and no built-in set; built in are: {built_in}") from error
    except OSError as error:
        raise PromptError(f"{name_or_path}: cannot be read: {error.strerror}") from error


def _parse_lines(data: bytes, label: str) -> Iterator[BenchPrompt]:
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            try:
                yield _parse_line(line, number)
            except PromptError as error:
                raise PromptError(f"{label}:{number}: {error}") from error


def _parse_line(line: bytes, number: int) -> BenchPrompt:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PromptError(f"byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8") from error
    except ValueError as error:
        raise PromptError(f"not JSON ({error}); expected one object a line") from error
    if not isinstance(record, dict):
        raise PromptError(f"found a JSON {type(record).__name__}; expected an object with {_expected_keys()}")
    keys = [key for key in _PROMPT_KEYS if key in record]
    if len(keys) != 1:
        raise PromptError(f"found the keys {', '.join(record) or '(none)'}; expected exactly one of {_expected_keys()}")
    prompt_id = _prompt_id(record, number)
    if keys == ["prompt"]:
        return BenchPrompt(prompt_id, None, _text(record["prompt"], "`prompt`"))
    messages = _first_turn(record["turns"]) if keys == ["turns"] else _through_first_user(record["messages"])
    return BenchPrompt(prompt_id, messages, None)


def _expected_keys() -> str:
    return ", ".join(f"`{key}`" for key in _PROMPT_KEYS)


def _prompt_id(record: dict[str, Any], number: int) -> str:
    """`id`, else `question_id` as in MT-bench and its descendants, else the line number."""
    value = record.get("id", record.get("question_id", number))
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise PromptError(f"the id is a {type(value).__name__}; expected a string or an integer")
    return str(value)


def _first_turn(turns: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise PromptError("`turns` must be a list of at least one string")
    return ({"role": "user", "content": _text(turns[0], "`turns[0]`")},)


def _through_first_user(messages: Any) -> tuple[dict[str, str], ...]:
    """The first user message and what precedes it, such as a system message."""
    if not isinstance(messages, list):
        raise PromptError("`messages` must be a list of objects with the strings `role` and `content`")
    kept: list[dict[str, str]] = []
    for message in messages:
        kept.append(_message(message))
        if kept[-1]["role"] == "user":
            _text(kept[-1]["content"], "the first user message")
            return tuple(kept)
    raise PromptError("`messages` has no message with the role user")


def _message(message: Any) -> dict[str, str]:
    match message:
        case {"role": str(role), "content": str(content)}:
            return {"role": role, "content": content}
    raise PromptError("each of `messages` must be an object with the strings `role` and `content`")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{name} is a {type(value).__name__}; expected a string")
    if not value.strip():
        raise PromptError(f"{name} is blank; a prompt needs some text")
    return value
