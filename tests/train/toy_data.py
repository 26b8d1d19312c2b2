"""Small random training data."""

from __future__ import annotations

from pathlib import Path

import torch

from trtspec.train.fit import TargetTables
from trtspec.train.head import HeadSizes
from trtspec.train.store import Example, TrainingData, shard_files, write_shard

VOCAB = 40
SIZES = HeadSizes(hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8)


def example(length: int, prompt_length: int, seed: int) -> Example:
    """A random sequence."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (length,), generator=generator, dtype=torch.int32)
    return Example(tokens, torch.randn(length, SIZES.hidden_size, generator=generator).half(), prompt_length)


def data(directory: Path, count: int = 24) -> TrainingData:
    """Sequences of 5 to 12 tokens in two shards."""
    directory.mkdir(parents=True, exist_ok=True)
    examples = [example(5 + n % 8, 1 + n % 4, n) for n in range(count)]
    write_shard(directory, 0, examples[: count // 2])
    write_shard(directory, 1, examples[count // 2 :])
    return TrainingData(shard_files(directory))


def tables(loss_vocab: int = 30) -> TargetTables:
    """Random tables of a target."""
    generator = torch.Generator().manual_seed(99)
    embedding = torch.randn(VOCAB, SIZES.hidden_size, generator=generator)
    token_ids = torch.arange(VOCAB - loss_vocab, VOCAB)
    return TargetTables(embedding, embedding, token_ids)
