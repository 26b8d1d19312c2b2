"""Collecting training data: a target's answers to prompts, or given texts, with the target's hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.errors import ConfigError, PromptError
from trtspec.prompt import Prompt
from trtspec.session import Session
from trtspec.train.store import Example, begin_collection, write_shard

PER_SHARD = 256
"""Sequences in a shard: what an interrupted collection loses at most."""

Progress = Callable[[int, int], None]
"""Called with sequences done and all sequences."""


def collect_answers(
    session: Session,
    prompts: Seq[Prompt],
    directory: Path,
    *,
    max_new_tokens: int = 160,
    progress: Progress | None = None,
) -> None:
    """Generate the target's greedy answers and store them with their hidden states; goes on where it stopped.

    Raises:
        PromptError: a prompt is empty or too long; all are checked before the first is answered.
        ConfigError: the directory holds other data, or the session's hidden states are tapped for an EAGLE-3 head.
    """
    ids = [_encode(session, f"prompt {number}", prompt) for number, prompt in enumerate(prompts, 1)]
    sampling, plain = SamplingParams(max_new_tokens), SpeculationConfig(method="none")

    def answered(part: list[list[int]]) -> list[Example]:
        answers = session.generate([*part], sampling, plain)
        return [_example(session, prompt, answer.token_ids) for prompt, answer in zip(part, answers, strict=True)]

    _collect(session, ids, answered, directory, {"max_new_tokens": max_new_tokens}, progress)


def collect_texts(session: Session, file: Path, directory: Path, *, progress: Progress | None = None) -> None:
    """Store given conversations with the target's hidden states; goes on where it stopped.

    Args:
        file: .jsonl; each line an object with `messages`, the last of which is the answer, or with `prompt` and
            `answer`.

    Raises:
        PromptError: a line is malformed, or too long for the session; all are checked first.
        ConfigError: as for `collect_answers`.
    """

    def measured(part: list[tuple[list[int], list[int]]]) -> list[Example]:
        return [_example(session, prompt, answer) for prompt, answer in part]

    _collect(session, _read_texts(session, file), measured, directory, {}, progress)


def _collect(
    session: Session,
    items: Seq[Any],
    make: Callable[[list[Any]], list[Example]],
    directory: Path,
    settings: dict[str, Any],
    progress: Progress | None,
) -> None:
    head = session.engine_dir.draft_head
    if head is not None and head.config["feature"] != "post_norm":
        raise ConfigError("this engine directory taps features for an EAGLE-3 head; build it with --no-eagle")
    target = {"target": session.engine_dir.embedding.shape, "name": session.engine_dir.target.name}
    done = begin_collection(directory, {**settings, **target, "items": items, "per_shard": PER_SHARD})
    for start in range(done * PER_SHARD, len(items), PER_SHARD):
        part = list(items[start : start + PER_SHARD])
        write_shard(directory, start // PER_SHARD, make(part))
        if progress:
            progress(start + len(part), len(items))


def _example(session: Session, prompt: Seq[int], answer: Seq[int]) -> Example:
    """All tokens but the last, behind which nothing was computed; what follows them is in the hidden states."""
    tokens = [*prompt, *answer][:-1]
    features = session.features(tokens).to("cpu", torch.float16)
    return Example(torch.tensor(tokens, dtype=torch.int32), features, len(prompt))


def _encode(session: Session, where: str, prompt: Prompt) -> list[int]:
    try:
        return session.encode(prompt)
    except PromptError as error:
        raise PromptError(f"{where}: {error}") from None


def _read_texts(session: Session, file: Path) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of every line as token ids; an answer ends with the end-of-sequence token."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise PromptError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"{file} is not UTF-8 (byte {error.start}); convert it") from None
    end = list(session.engine_dir.target.config["eos_token_ids"])[:1]
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file} line {number}"
        prompt, answer = _conversation(where, line)
        ids = _encode(session, where, prompt)
        answer_ids = [*session.tokenizer.encode(answer, add_special_tokens=False), *end]
        if len(ids) + len(answer_ids) > session.limits.max_seq_len:
            raise PromptError(
                f"{where}: {len(ids)} + {len(answer_ids)} tokens, and the engine directory holds "
                f"{session.limits.max_seq_len} per sequence; shorten it or build with a larger --max-seq-len"
            )
        texts.append((ids, answer_ids))
    return texts


def _conversation(where: str, line: str) -> tuple[Prompt, str]:
    try:
        data = json.loads(line)
        if "messages" in data:
            *before, last = data["messages"]
            prompt, answer = before, last["content"]
        else:
            prompt, answer = data["prompt"], data["answer"]
    except (ValueError, KeyError, TypeError) as error:
        raise PromptError(
            f"{where}: expected an object with `messages` that end with the answer, or with `prompt` and `answer` "
            f"({error!r})"
        ) from None
    if not isinstance(answer, str) or not answer:
        raise PromptError(f"{where}: the answer is {answer!r}; give text")
    return prompt, answer
