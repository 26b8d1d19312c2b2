"""From an engine directory to training data, and from a trained head to a draft head that is read and drafts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from graph.head_oracle import HeadOracle
from safetensors.torch import load_file, save_file
from train import toy_data

import trtspec
from trtspec.checkpoint.draft_head import RANKING, open_draft_head
from trtspec.checkpoint.draft_head.token_ids import read_ranking
from trtspec.checkpoint.target import TargetConfig
from trtspec.errors import CheckpointError, ConfigError, PromptError, UserError
from trtspec.train import collect
from trtspec.train.export import export_head, load_head
from trtspec.train.fit import TrainConfig, Trainer
from trtspec.train.head import EagleHead, causal_mask, rotary_tables
from trtspec.train.store import TrainingData, shard_files
from trtspec.train.tables import head_sizes, target_tables, token_ranking

PROMPTS = ["one two three", "a longer prompt than the first", "x"]


def test_answers_are_the_targets_and_so_are_the_hidden_states(tiny_dir: Path, tmp_path: Path) -> None:
    with trtspec.Session.open(tiny_dir) as session:
        collect.collect_answers(session, PROMPTS, tmp_path, max_new_tokens=9)
        data = TrainingData(shard_files(tmp_path))
        plain = trtspec.SpeculationConfig(method="none")
        completions = session.generate(PROMPTS, trtspec.SamplingParams(9), plain)
        for prompt, completion, example in zip(PROMPTS, completions, data.examples, strict=True):
            ids = [*session.encode(prompt), *completion.token_ids]
            assert example.tokens.tolist() == ids[:-1]
            assert example.prompt_length == completion.prompt_tokens
            assert torch.equal(example.hidden, session.features(ids[:-1]).half())
            last = session.next_logits(ids[:-1])
            assert int(last.argmax()) == ids[-1]


def test_a_collection_goes_on_where_it_stopped(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "PER_SHARD", 2)
    with trtspec.Session.open(tiny_dir) as session:
        collect.collect_answers(session, PROMPTS, tmp_path / "whole", max_new_tokens=5)

        def stop(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            collect.collect_answers(session, PROMPTS, tmp_path / "parts", max_new_tokens=5, progress=stop)
        seen: list[tuple[int, int]] = []
        collect.collect_answers(
            session, PROMPTS, tmp_path / "parts", max_new_tokens=5, progress=lambda done, of: seen.append((done, of))
        )
        with pytest.raises(ConfigError, match="other prompts or settings"):
            collect.collect_answers(session, PROMPTS[:2], tmp_path / "parts", max_new_tokens=5)
    assert seen == [(3, 3)]
    whole, parts = (TrainingData(shard_files(tmp_path / name)).examples for name in ("whole", "parts"))
    assert [example.tokens.tolist() for example in whole] == [example.tokens.tolist() for example in parts]


def test_given_texts_are_taken_as_they_are(tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello there"}]
    lines = [{"messages": messages}, {"prompt": "one two", "answer": " three four"}]
    file.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    with trtspec.Session.open(tiny_dir) as session:
        collect.collect_texts(session, file, tmp_path / "data")
        first, second = TrainingData(shard_files(tmp_path / "data")).examples
        assert first.prompt_length == len(session.encode(messages[:1]))
        # The end-of-sequence token comes last, and the last token is left out.
        expected = [*session.encode("one two"), *session.tokenizer.encode(" three four", add_special_tokens=False)]
        assert second.tokens.tolist() == expected
        for line in (
            "{",
            "[]",
            '{"prompt": "x"}',
            '{"messages": []}',
            '{"prompt": "x", "answer": ""}',
            '{"prompt": "x", "answer": null}',
        ):
            file.write_text(line, encoding="utf-8")
            with pytest.raises(PromptError, match=r"texts.jsonl line 1"):
                collect.collect_texts(session, file, tmp_path / "other")


def test_an_exported_head_is_read_and_computes_the_same(tmp_path: Path) -> None:
    torch.manual_seed(3)
    head = EagleHead(toy_data.SIZES)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1).copy_(parameter.half().float())
    export_head(head, tmp_path / "head", vocab_size=toy_data.VOCAB, max_positions=64, ranking=[5, 3, 39])
    target = TargetConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": toy_data.SIZES.hidden_size,
            "intermediate_size": 24,
            "num_hidden_layers": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": toy_data.VOCAB,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64,
            "eos_token_id": 1,
        },
        {},
    )
    read = open_draft_head(tmp_path / "head", target)
    assert read.ranking == (5, 3, 39)
    assert read.config.token_ids is None
    assert read.warnings == ()
    tables = toy_data.tables()
    oracle = HeadOracle(tmp_path / "head", tables.embedding, tables.lm_head)
    tokens, hidden = torch.randint(0, toy_data.VOCAB, (7,)), torch.randn(7, toy_data.SIZES.hidden_size)
    mask = causal_mask(7, hidden.device)
    embeds = tables.embedding[tokens]
    found, _ = head(embeds[None], hidden[None], rotary_tables(head.sizes, 7), [], mask)
    expected = oracle.forward(embeds.double(), hidden.double(), torch.arange(7), mask == 0)
    torch.testing.assert_close(found[0], expected.feedback.float(), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="not empty"):
        export_head(head, tmp_path / "head", vocab_size=toy_data.VOCAB, max_positions=64)
    loaded, ranking = load_head(tmp_path / "head", target, rope_theta=5e5)
    assert ranking == (5, 3, 39)
    assert loaded.sizes == dataclasses.replace(head.sizes, rope_theta=5e5)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in head.state_dict().items())
    assert load_head(tmp_path / "head", target)[0].sizes == head.sizes


def test_a_head_of_another_kind_is_no_start(tiny_dir: Path, tmp_path: Path) -> None:
    target = TargetConfig.from_json(trtspec.EngineDir.load(tiny_dir).target.config)
    sizes = head_sizes(trtspec.EngineDir.load(tiny_dir), None, 10000.0)
    export_head(EagleHead(sizes), tmp_path / "head", vocab_size=target.vocab_size, max_positions=64)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    rows = {kind: len(tensors[f"layers.0.self_attn.{kind}_proj.weight"]) for kind in "qkv"}
    biases = {f"layers.0.self_attn.{kind}_proj.bias": torch.ones(size) for kind, size in rows.items()}
    save_file({**tensors, **biases}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(ConfigError, match="no EAGLE-1 head of one plain Llama layer"):
        load_head(tmp_path / "head", target)
    narrow = dataclasses.replace(sizes, hidden_size=sizes.hidden_size // 2)
    export_head(EagleHead(narrow), tmp_path / "narrow", vocab_size=target.vocab_size, max_positions=64)
    with pytest.raises(CheckpointError):
        load_head(tmp_path / "narrow", target)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_head(tmp_path / "nothing", target)


def test_rankings_of_earlier_data_count(tiny_dir: Path, tmp_path: Path) -> None:
    with trtspec.Session.open(tiny_dir) as session:
        collect.collect_answers(session, PROMPTS, tmp_path, max_new_tokens=9)
    target, data = trtspec.EngineDir.load(tiny_dir), TrainingData(shard_files(tmp_path))
    own = token_ranking(data, target)
    unused = [token for token in range(100) if token not in own][:4]
    merged = token_ranking(data, target, unused)
    assert set(merged) == {*own, *unused}
    # Places 0 to 3 of the earlier list; 0, 3, 6, ... of this one; and the lower id where two are at one place.
    assert set(merged[:2]) == {own[0], unused[0]}
    assert merged[2:4] == unused[1:3]
    tables = target_tables(target, data, 5, torch.device("cpu"), unused)
    assert sorted(merged[:5]) == tables.token_ids.tolist()


@pytest.mark.parametrize("text", ["{", "{}", "[1, -1]", "[40]", "[1, 1]", "[true]", '["1"]'])
def test_a_damaged_ranking_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / RANKING).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=RANKING):
        read_ranking(tmp_path, 40)


def test_a_trained_head_drafts(tiny_dir: Path, tiny_hf_dir: Path, tmp_path: Path) -> None:
    prompts = [f"prompt number {n}" for n in range(12)]
    with trtspec.Session.open(tiny_dir) as session:
        collect.collect_answers(session, prompts, tmp_path / "data", max_new_tokens=24)
        expected = session.generate(prompts, trtspec.SamplingParams(24), trtspec.SpeculationConfig(method="none"))
    data = TrainingData(shard_files(tmp_path / "data"))
    target = trtspec.EngineDir.load(tiny_dir)
    tables = target_tables(target, data, 256, torch.device("cpu"))
    config = TrainConfig(epochs=30, held_out=2, rows_per_step=128, rows_per_pass=128, precision="float32")
    trainer = Trainer(head_sizes(target, None, 10000.0), config, data, tables, tmp_path / "run")
    trainer.run()
    vocab = target.target.config["vocab_size"]
    ranking = token_ranking(data, target)
    export_head(trainer.head, tmp_path / "head", vocab_size=vocab, max_positions=512, ranking=ranking)
    trtspec.build(tiny_hf_dir, tmp_path / "engines", eagle=tmp_path / "head", draft_vocab=256)
    assert trtspec.EngineDir.load(tmp_path / "engines").draft_head.lm_head == "reduced"
    with trtspec.Session.open(tmp_path / "engines") as session:
        found = session.generate(prompts, trtspec.SamplingParams(24), trtspec.SpeculationConfig(method="eagle"))
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    accepted = sum(item.stats.accepted_tokens for item in found)
    # Learned by heart: the sequences are those it was trained on, all but two.
    assert accepted > 0.5 * sum(item.stats.steps for item in found)
