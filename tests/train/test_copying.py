"""Copying heads: what they add to, and that they are taught to find the text before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train import toy_data

from trtspec.train.copying import CopyLesson, blended, source_rows, widened, with_copying
from trtspec.train.head import EagleHead, HeadSizes, causal_mask, rotary_tables
from trtspec.train.store import Example, TrainingData, shard_files, write_shard

SIZES = HeadSizes(hidden_size=64, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=32, rope_theta=1e6)


def _run(head: EagleHead, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    length = embeds.shape[1]
    output, _ = head(embeds, hidden, rotary_tables(head.sizes, length), [], causal_mask(length, embeds.device))
    return output


def _repeating(directory: Path, count: int = 60) -> TrainingData:
    """Sequences of a random part and the same part again; hidden states that say which token was read."""
    generator = torch.Generator().manual_seed(0)
    read = torch.randn(toy_data.VOCAB, SIZES.hidden_size, generator=generator)
    examples = []
    for _ in range(count):
        part = torch.randperm(toy_data.VOCAB, generator=generator)[:12].to(torch.int32)
        tokens = torch.cat([part, part])
        hidden = read[tokens.long()] + 0.1 * torch.randn(24, SIZES.hidden_size, generator=generator)
        examples.append(Example(tokens, hidden.half(), 12))
    write_shard(directory, 0, examples)
    return TrainingData(shard_files(directory))


def test_source_rows_say_what_follows() -> None:
    # Rows 3 and on: token 4 is a 5 again, so row 1 (token 1 is 5, token 2 is 6) says that a 6 follows.
    found = source_rows(torch.tensor([4, 5, 6, 7, 5, 6, 8]))
    assert found.nonzero().tolist() == [[3, 1]]


def test_a_wider_head_computes_the_same() -> None:
    torch.manual_seed(0)
    head = EagleHead(SIZES)
    wider = widened(head, 2)
    assert (wider.sizes.num_heads, wider.sizes.num_kv_heads) == (8, 4)
    embeds, hidden = torch.randn(2, 9, 64), torch.randn(2, 9, 64)
    torch.testing.assert_close(_run(wider, embeds, hidden), _run(head, embeds, hidden))


def test_a_blend_lies_between_start_and_trained_head() -> None:
    torch.manual_seed(0)
    start = EagleHead(SIZES)
    trained = EagleHead(widened(start, 1).sizes)
    embeds, hidden = torch.randn(2, 9, 64), torch.randn(2, 9, 64)
    for share, same in ((0.0, start), (1.0, trained)):
        blend = blended(start, trained, share)
        torch.testing.assert_close(_run(blend, embeds, hidden), _run(same, embeds, hidden))
    half = blended(start, trained, 0.5)
    torch.testing.assert_close(half.fc.weight, (start.fc.weight + trained.fc.weight) / 2)
    assert half.sizes == trained.sizes


def test_the_lesson_is_learned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data, embedding = _repeating(tmp_path), torch.randn(toy_data.VOCAB, SIZES.hidden_size)
    trained = EagleHead(SIZES)
    with torch.no_grad():
        trained.fc.weight[:, : SIZES.hidden_size].normal_(std=0.1)
    head = widened(trained, 1)
    losses = CopyLesson(head, embedding, 1, seed=0).teach(data, 200, strength=0.3)
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
    # With nothing but its embeddings found, the head's output leans towards the token that was copied.
    attention = head.layers[0].self_attn
    example = data.examples[0]
    tokens, hidden = example.tokens.long(), example.hidden.float()
    full = _run(head, embedding[tokens[1:]][None], hidden[None, :-1])[0]
    with torch.no_grad():
        attention.o_proj.weight[:, -2 * SIZES.head_dim :] = 0
    difference = full - _run(head, embedding[tokens[1:]][None], hidden[None, :-1])[0]
    copied = range(12, 22)
    logits = difference @ embedding.T
    ranks = [int((logits[row] > logits[row, tokens[row + 2]]).sum()) for row in copied]
    assert sum(ranks) / len(ranks) < toy_data.VOCAB / 6


def test_the_lesson_is_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtspec.train.copying.LESSON_STEPS", 3)
    data, embedding = _repeating(tmp_path), torch.randn(toy_data.VOCAB, SIZES.hidden_size)
    torch.manual_seed(0)
    head = EagleHead(SIZES)
    first, second = (with_copying(head, 1, data, embedding, seed=4).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
