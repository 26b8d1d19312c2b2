"""Training data on disk: token ids and the target's hidden states, in shards of safetensors files."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trtspec.errors import ConfigError

TOKENS, HIDDEN = "token_ids", "hidden_states"
LENGTHS, PROMPT_LENGTHS = "sequence_lengths", "prompt_lengths"
COLLECTION = "collection.txt"
"""Beside the shards: a hash of what they were made from."""
_PATTERN = "shard-*.safetensors"
# Batches are cut from this many sequences sorted by length: little padding, and yet another mixture in every epoch.
_SORTED_TOGETHER = 512


@dataclass(frozen=True)
class Example:
    """One sequence: `tokens` int32 `[n]`, `hidden` float16 `[n, hidden]`; hidden state i is that after token i."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    prompt_length: int


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right to one length."""

    tokens: torch.Tensor
    """int64 `[batch, length]`"""
    hidden: torch.Tensor
    """float16 `[batch, length, hidden]`"""
    answer: torch.Tensor
    """bool `[batch, length]`: hidden states from which the target chose a token of its answer, or those of a whole
    sequence whose prompt counts as an answer too."""


def begin_collection(directory: Path, settings: Mapping[str, Any]) -> int:
    """Prepare a directory for a collection, or for going on with it; returns how many shards it has.

    Args:
        settings: everything that decides what the shards hold, as JSON.

    Raises:
        ConfigError: the directory belongs to a collection with other settings, or a shard of it is missing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    described, files = directory / COLLECTION, shard_files(directory)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    if described.exists() and described.read_text(encoding="utf-8").strip() != digest:
        raise ConfigError(f"{directory} holds data of other prompts or settings; choose another --output")
    if files and not described.exists():
        raise ConfigError(f"{directory} holds data but no {COLLECTION}; choose another --output")
    for number, file in enumerate(files):
        if file != _shard(directory, number):
            raise ConfigError(f"{_shard(directory, number)} is missing; remove the shards behind it, or all of them")
    described.write_text(digest + "\n", encoding="utf-8")
    return len(files)


def write_shard(directory: Path, number: int, examples: Seq[Example]) -> Path:
    """Write a shard; it appears complete or not at all."""
    file = _shard(directory, number)
    tensors = {
        TOKENS: torch.cat([example.tokens.to(torch.int32) for example in examples]),
        HIDDEN: torch.cat([example.hidden.to(torch.float16) for example in examples]),
        LENGTHS: torch.tensor([len(example.tokens) for example in examples], dtype=torch.int32),
        PROMPT_LENGTHS: torch.tensor([example.prompt_length for example in examples], dtype=torch.int32),
    }
    partial = file.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(file)
    return file


def _shard(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.safetensors"


def shard_files(directory: Path) -> list[Path]:
    """The shards of a directory, in order."""
    return sorted(directory.glob(_PATTERN))


class TrainingData:
    """The sequences of some shards, memory-mapped."""

    def __init__(self, files: Seq[Path]) -> None:
        """Open shards.

        Raises:
            ConfigError: there are none, or one is damaged or of another hidden size.
        """
        if not files:
            raise ConfigError("there is no training data; collect some first: train_eagle.py collect")
        self.examples: list[Example] = []
        for file in files:
            self.examples += _read_shard(file)
        sizes = {example.hidden.shape[1] for example in self.examples}
        if len(sizes) != 1:
            raise ConfigError(f"the training data mixes hidden sizes {sorted(sizes)}; collect it with one target")
        self.hidden_size: int = sizes.pop()

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, prompts included."""
        return sum(len(example.tokens) for example in self.examples)

    def split(self, held_out: int, seed: int) -> tuple[TrainingData, TrainingData]:
        """Two disjoint parts: for training, and `held_out` sequences drawn by the seed."""
        if not 0 < held_out < len(self.examples):
            raise ConfigError(
                f"{held_out} of the {len(self.examples)} sequences would be held out, which leaves none to train on; "
                "collect more, or give a smaller --held-out"
            )
        order = list(range(len(self.examples)))
        random.Random(seed).shuffle(order)
        return self._part(order[held_out:]), self._part(order[:held_out])

    def _part(self, indices: list[int]) -> TrainingData:
        part = object.__new__(TrainingData)
        part.examples = [self.examples[index] for index in sorted(indices)]
        part.hidden_size = self.hidden_size
        return part

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token occurs in the answers, int64 `[vocab]`."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for example in self.examples:
            answer = example.tokens[example.prompt_length :].long()
            if len(answer) and int(answer.max()) >= vocab_size:
                raise ConfigError(f"the training data holds token {int(answer.max())}, the target has {vocab_size}")
            counts += torch.bincount(answer, minlength=vocab_size)
        return counts

    def feature_scale(self, samples: int = 200) -> float:
        """Root mean square of the hidden states' values, over the first sequences."""
        rows = torch.cat([example.hidden for example in self.examples[:samples]]).float()
        return float(rows.square().mean().sqrt())

    def batches(self, rows: int, seed: int, start: int = 0, read_prompts: int | None = None) -> Iterator[Batch]:
        """Every sequence once, in an order that the seed decides, in batches of at most `rows` padded rows.

        Args:
            start: batches to leave out at the beginning.
            read_prompts: prompts of at least so many tokens count as answers: what the target expects at each place of
                a given text teaches as much as what it writes itself.
        """
        for group in self._groups(rows, seed)[start:]:
            yield _pad([self.examples[index] for index in group], read_prompts)

    def num_batches(self, rows: int, seed: int) -> int:
        """How many batches there are for a seed: lengths meet differently in each order."""
        return len(self._groups(rows, seed))

    def _groups(self, rows: int, seed: int) -> list[list[int]]:
        """The sequences of each batch."""
        rng = random.Random(seed)
        order = list(range(len(self.examples)))
        rng.shuffle(order)
        groups: list[list[int]] = []
        for at in range(0, len(order), _SORTED_TOGETHER):
            window = sorted(order[at : at + _SORTED_TOGETHER], key=lambda index: len(self.examples[index].tokens))
            groups += _cut(window, [len(self.examples[index].tokens) for index in window], rows)
        rng.shuffle(groups)
        return groups


def _cut(indices: list[int], lengths: list[int], rows: int) -> list[list[int]]:
    """Consecutive groups whose padded size stays within `rows`; `lengths` ascend."""
    groups: list[list[int]] = [[]]
    for index, length in zip(indices, lengths, strict=True):
        if groups[-1] and (len(groups[-1]) + 1) * length > rows:
            groups.append([])
        groups[-1].append(index)
    return groups


def _pad(examples: list[Example], read_prompts: int | None = None) -> Batch:
    length = max(len(example.tokens) for example in examples)
    tokens = torch.zeros(len(examples), length, dtype=torch.int64)
    hidden = torch.zeros(len(examples), length, examples[0].hidden.shape[1], dtype=torch.float16)
    answer = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, example in enumerate(examples):
        size = len(example.tokens)
        tokens[row, :size] = example.tokens
        hidden[row, :size] = example.hidden
        read = read_prompts is not None and example.prompt_length >= read_prompts
        answer[row, 0 if read else max(example.prompt_length - 1, 0) : size] = True
    return Batch(tokens, hidden, answer)


def _read_shard(file: Path) -> list[Example]:
    try:
        tensors = load_file(file)
        tokens, hidden = tensors[TOKENS], tensors[HIDDEN]
        lengths, prompts = tensors[LENGTHS].tolist(), tensors[PROMPT_LENGTHS].tolist()
    except (OSError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"{file} is no shard of training data ({error}); remove it and those behind it, and collect again"
        ) from None
    if sum(lengths) != len(tokens) or len(tokens) != len(hidden) or len(prompts) != len(lengths):
        raise ConfigError(f"{file} is damaged: its lengths don't add up; remove it and those behind it")
    return [
        Example(part, states, prompt)
        for part, states, prompt in zip(tokens.split(lengths), hidden.split(lengths), prompts, strict=True)
    ]
