"""Collecting training data: a target's answers to prompts, or given texts, with the target's hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.errors import ConfigError, PromptError
from trtspec.prompt import Prompt
from trtspec.session import Session
from trtspec.train.store import Example, shard_files, write_shard

PER_SHARD = 256
"""Sequences in a shard: what an interrupted collection loses at most."""


def collect_answers(
    session: Session,
    prompts: Seq[Prompt],
    directory: Path,
    *,
    max_new_tokens: int = 160,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Generate the target's greedy answers and store them with their hidden states; goes on where it stopped.

    Args:
        directory: made for this list of prompts alone: shard n holds prompts n * PER_SHARD and on.
        progress: called with prompts done and all prompts.

    Raises:
        PromptError: a prompt leaves no room for an answer.
    """
    sampling, plain = SamplingParams(max_new_tokens), SpeculationConfig(method="none")
    for start in range(len(shard_files(directory)) * PER_SHARD, len(prompts), PER_SHARD):
        part = [session.encode(prompt) for prompt in prompts[start : start + PER_SHARD]]
        answers = session.generate([*part], sampling, plain)
        pairs = [(ids, answer.token_ids) for ids, answer in zip(part, answers, strict=True)]
        write_shard(directory, [_example(session, ids, answer) for ids, answer in pairs])
        if progress:
            progress(start + len(part), len(prompts))


def collect_texts(
    session: Session, file: Path, directory: Path, *, progress: Callable[[int], None] | None = None
) -> None:
    """Store given conversations with the target's hidden states; goes on where it stopped.

    Args:
        file: .jsonl; each line an object with `messages`, the last of which is the answer, or with `prompt` and
            `answer`.
        progress: called with conversations done.

    Raises:
        PromptError: a line is malformed, or too long for the session.
    """
    examples: list[Example] = []
    skip = len(shard_files(directory)) * PER_SHARD
    for number, (prompt, answer) in enumerate(_read_texts(session, file), 1):
        if number <= skip:
            continue
        examples.append(_example(session, prompt, answer))
        if len(examples) == PER_SHARD:
            write_shard(directory, examples)
            examples = []
            if progress:
                progress(number)
    if examples:
        write_shard(directory, examples)


def _example(session: Session, prompt: Seq[int], answer: Seq[int]) -> Example:
    """All tokens but the last, behind which nothing was computed; what follows them is in the hidden states."""
    tokens = [*prompt, *answer][:-1]
    features = session.features(tokens)
    if features.shape[1] != session.hidden_size:
        raise ConfigError("this engine directory taps features for an EAGLE-3 head; build it with --no-eagle")
    return Example(torch.tensor(tokens, dtype=torch.int32), features.to("cpu", torch.float16), len(prompt))


def _read_texts(session: Session, file: Path) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, answer) as token ids, line by line."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise PromptError(f"{file} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt, answer = _conversation(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise PromptError(
                f"{file} line {number}: expected an object with `messages` that end with the answer, or with `prompt` "
                f"and `answer` ({error!r})"
            ) from None
        ids = session.encode(prompt)
        answer_ids = session.tokenizer.encode(answer)
        if not answer_ids or len(ids) + len(answer_ids) > session.limits.max_seq_len:
            raise PromptError(
                f"{file} line {number}: {len(ids)} + {len(answer_ids)} tokens; an answer must not be empty, and the "
                f"engine directory holds {session.limits.max_seq_len}"
            )
        yield ids, answer_ids


def _conversation(data: Any) -> tuple[Prompt, str]:
    if "messages" in data:
        *before, last = data["messages"]
        return before, str(last["content"])
    return str(data["prompt"]), str(data["answer"])
