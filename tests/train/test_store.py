"""Shards of training data and the batches made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train import toy_data

from trtspec.errors import ConfigError
from trtspec.train.store import COLLECTION, TrainingData, _cut, begin_collection, shard_files, write_shard


def test_shards_give_back_what_was_written(tmp_path: Path) -> None:
    examples = [toy_data.example(7, 3, 1), toy_data.example(4, 4, 2)]
    write_shard(tmp_path, 0, examples)
    write_shard(tmp_path, 1, examples[:1])
    data = TrainingData(shard_files(tmp_path))
    assert len(data) == 3
    assert data.num_tokens == 18
    for found, expected in zip(data.examples, [*examples, examples[0]], strict=True):
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.hidden, expected.hidden)
        assert found.prompt_length == expected.prompt_length


def test_an_epoch_holds_every_sequence_once_and_the_seed_decides_the_order(tmp_path: Path) -> None:
    data = toy_data.data(tmp_path)

    def rows(seed: int) -> list[tuple[int, ...]]:
        return [tuple(row.tolist()) for batch in data.batches(40, seed) for row in batch.tokens]

    def stripped(seed: int) -> list[tuple[int, ...]]:
        found = []
        for batch in data.batches(40, seed):
            for row, hidden in zip(batch.tokens, batch.hidden, strict=True):
                size = int(hidden.abs().sum(-1).count_nonzero())
                found.append(tuple(row[:size].tolist()))
        return found

    assert sorted(stripped(0)) == sorted(tuple(example.tokens.tolist()) for example in data.examples)
    assert rows(0) == rows(0)
    batches = [batch.tokens.tolist() for batch in data.batches(40, 0)]
    assert len(batches) == data.num_batches(40, 0)
    assert [batch.tokens.tolist() for batch in data.batches(40, 0, start=2)] == batches[2:]
    assert rows(0) != rows(1)


def test_batches_mark_the_hidden_states_from_which_the_answer_was_chosen(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [toy_data.example(6, 4, 1), toy_data.example(3, 1, 2)])
    (batch,) = TrainingData(shard_files(tmp_path)).batches(100, 0)
    by_length = {
        int(hidden.abs().sum(-1).count_nonzero()): row for hidden, row in zip(batch.hidden, batch.answer, strict=True)
    }
    assert by_length[6].tolist() == [False, False, False, True, True, True]
    assert by_length[3].tolist() == [True, True, True, False, False, False]


def test_long_prompts_may_count_as_answers(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [toy_data.example(6, 4, 1), toy_data.example(6, 3, 2)])
    data = TrainingData(shard_files(tmp_path))
    for read_prompts, marked in ((5, {3, 4}), (4, {4, 6}), (1, {6})):
        (batch,) = data.batches(100, 0, read_prompts=read_prompts)
        assert set(batch.answer.sum(1).tolist()) == marked


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_groups_keep_order_and_size(lengths: list[int], rows: int) -> None:
    lengths = sorted(lengths)
    groups = _cut(list(range(len(lengths))), lengths, rows)
    assert [index for group in groups for index in group] == list(range(len(lengths)))
    for group in groups:
        if len(group) > 1:
            assert len(group) * max(lengths[index] for index in group) <= rows


def test_split_is_disjoint_and_complete(tmp_path: Path) -> None:
    data = toy_data.data(tmp_path)
    training, held_out = data.split(5, seed=3)
    assert (len(training), len(held_out)) == (19, 5)
    assert training.num_tokens + held_out.num_tokens == data.num_tokens
    again, _ = data.split(5, seed=3)
    assert [e.tokens.tolist() for e in again.examples] == [e.tokens.tolist() for e in training.examples]
    with pytest.raises(ConfigError, match="24 of the 24 sequences would be held out"):
        data.split(24, seed=0)


def test_token_counts_are_those_of_the_answers(tmp_path: Path) -> None:
    example = toy_data.example(6, 4, 1)
    write_shard(tmp_path, 0, [example])
    counts = TrainingData(shard_files(tmp_path)).token_counts(toy_data.VOCAB)
    assert counts.sum() == 2
    assert all(counts[token] for token in example.tokens[4:].long())
    with pytest.raises(ConfigError, match="the target has 1"):
        TrainingData(shard_files(tmp_path)).token_counts(1)


def test_a_collection_goes_on_only_with_what_it_was_begun_with(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    assert begin_collection(directory, {"prompts": [1]}) == 0
    for number in range(3):
        write_shard(directory, number, [toy_data.example(6, 4, number)])
    assert begin_collection(directory, {"prompts": [1]}) == 3
    with pytest.raises(ConfigError, match="other prompts or settings"):
        begin_collection(directory, {"prompts": [2]})
    shard_files(directory)[1].unlink()
    with pytest.raises(ConfigError, match=r"shard-00001.safetensors is missing"):
        begin_collection(directory, {"prompts": [1]})
    (directory / COLLECTION).unlink()
    with pytest.raises(ConfigError, match=COLLECTION):
        begin_collection(directory, {"prompts": [1]})


def test_bad_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no training data"):
        TrainingData([])
    write_shard(tmp_path, 0, [toy_data.example(6, 4, 1)])
    file = shard_files(tmp_path)[0]
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    with pytest.raises(ConfigError, match=r"shard-00000.safetensors is no shard"):
        TrainingData([file])
