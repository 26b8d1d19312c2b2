"""EAGLE-1 heads: the official format, vLLM's, and those with extra norms, as one canonical record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from heads import HIDDEN, VOCAB, make_e1, make_e2, target_config, weight

from trtspec.checkpoint.draft_head import DraftHead, DraftHeadConfig, open_draft_head, weight_shapes
from trtspec.errors import CheckpointError, ConfigError

TARGET = target_config()
PLAIN = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    **{
        name: name
        for name in heads.e1_tensors()
        if name.startswith("layers.0.") and not name.endswith("input_layernorm.weight")
    },
}


def origins(head: DraftHead) -> dict[str, str]:
    """Where each decision came from."""
    return {decision.name: decision.origin for decision in head.decisions}


def check(head: DraftHead, stored: dict[str, torch.Tensor], names: dict[str, str]) -> None:
    """The head has these tensors and no others, equal to the stored ones (names by canonical name)."""
    assert set(head.tensors.tensors) == set(names)
    assert list(head.tensors.tensors) == list(weight_shapes(head.config))
    for name, original in names.items():
        loaded = head.tensors.load(name)
        assert torch.equal(loaded, stored[original]), name
        assert tuple(loaded.shape) == head.tensors.tensors[name].shape == weight_shapes(head.config)[name]


def test_official(tmp_path: Path) -> None:
    stored = make_e1(tmp_path)
    assert len(stored) == 11
    head = open_draft_head(tmp_path, TARGET, target_embedding=heads.embedding)
    check(head, stored, PLAIN)
    assert head.warnings == ()
    config = head.config
    assert (config.kind, config.source_format, config.feature, config.boundaries) == (
        "eagle",
        "eagle-official",
        "post_norm",
        (),
    )
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (1, 2, 1, 16)
    assert (config.input_norm, config.output_norm, config.embedding_norm, config.hidden_norm) == (False,) * 4
    assert (config.residual, config.feedback, config.fc_bias, config.has_fc) == ("raw", "pre_norm", True, True)
    assert (config.own_embedding, config.own_lm_head, config.token_ids) == (False, False, None)
    assert (config.draft_vocab_size, config.rms_norm_eps, config.rope.theta) == (VOCAB, 1e-6, 10000.0)
    found = origins(head)
    assert found["own_embedding"] == found["fc_bias"] == "tensor"
    assert found["rms_norm_eps"] == "config"
    assert found["output_norm"] == "default"
    assert DraftHeadConfig.from_json(config.to_json()) == config


def test_without_fc_bias(tmp_path: Path) -> None:
    stored = make_e1(tmp_path, fc_bias=False)
    assert len(stored) == 10
    head = open_draft_head(str(tmp_path), TARGET, target_embedding=heads.embedding)
    check(head, stored, {name: name for name in PLAIN if name != "fc.bias"})
    assert not head.config.fc_bias
    assert head.warnings == ()


@pytest.mark.parametrize(
    ("fc_bias", "fields", "words"),
    [
        (True, {"bias": False}, "has fc bias, config.json says none"),
        (False, {"bias": True}, "has no fc bias, config.json implies one"),
        (False, {"bias": None}, "has no fc bias, config.json implies one"),
    ],
)
def test_fc_bias_follows_the_tensors(tmp_path: Path, fc_bias: bool, fields: dict[str, Any], words: str) -> None:
    make_e1(tmp_path, fc_bias=fc_bias, config=fields)
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.fc_bias == fc_bias
    assert len(head.warnings) == 1
    assert words in head.warnings[0]


def test_qkv_bias(tmp_path: Path) -> None:
    stored = make_e1(tmp_path, qkv_bias=True)
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.qkv_bias
    biases = [name for name in stored if "_proj.bias" in name]
    assert len(biases) == 3
    check(head, stored, {**PLAIN, **{name: name for name in biases}})


def test_two_layers(tmp_path: Path) -> None:
    stored = make_e1(tmp_path, layers=2)
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.num_layers, head.config.input_norm) == (2, False)
    later = {name: name for name in stored if name.startswith("layers.1.") and "input_layernorm" not in name}
    check(head, stored, {**PLAIN, **later, "layers.1.input_norm.weight": "layers.1.input_layernorm.weight"})
    make_e1(tmp_path, layers=2, changes={"layers.1.input_layernorm.weight": None})
    with pytest.raises(CheckpointError, match=r"no tensor layers\.1\.input_layernorm\.weight"):
        open_draft_head(tmp_path, TARGET)


def test_norms_that_eagle_does_not_have_are_ignored(tmp_path: Path) -> None:
    stored = make_e1(tmp_path, poison=True)
    head = open_draft_head(tmp_path, TARGET)
    check(head, stored, PLAIN)
    assert len(head.warnings) == 2
    assert "layers.0.input_layernorm.weight is ignored" in head.warnings[0]
    assert "norm.weight is ignored" in head.warnings[1]


def test_norms_by_option(tmp_path: Path) -> None:
    make_e1(tmp_path, poison=True)
    head = open_draft_head(tmp_path, TARGET, {"input_norm": "true", "output_norm": "true", "norm_output": "false"})
    assert (head.config.input_norm, head.config.output_norm, head.config.feedback) == (True, True, "pre_norm")
    assert origins(head)["input_norm"] == origins(head)["feedback"] == "option"
    assert torch.equal(head.tensors.load("norm.weight"), torch.full((HIDDEN,), 7.0))
    assert head.warnings == ()
    make_e1(tmp_path)
    for options in ({"input_norm": "true"}, {"output_norm": "true"}, {"norm_output": "true"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            open_draft_head(tmp_path, TARGET, options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("safetensors", [True, False])
def test_files_and_dtypes(tmp_path: Path, dtype: torch.dtype, safetensors: bool) -> None:
    stored = make_e1(tmp_path, dtype=dtype, safetensors=safetensors)
    head = open_draft_head(tmp_path, TARGET, target_embedding=heads.embedding)
    check(head, stored, PLAIN)
    assert head.warnings == ()
    assert {info.dtype for info in head.tensors.tensors.values()} == {str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("prefix", ["model.", "module.", "module.module.", "module.model.", "model.model."])
def test_prefixes(tmp_path: Path, prefix: str) -> None:
    stored = make_e1(tmp_path, rename=lambda name: prefix + name)
    check(open_draft_head(tmp_path, TARGET), stored, {name: prefix + name for name in PLAIN})


def test_one_weight_twice(tmp_path: Path) -> None:
    make_e1(tmp_path, changes={"model.fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)})
    with pytest.raises(CheckpointError, match=r"both (model\.)?fc\.weight and (model\.)?fc\.weight"):
        open_draft_head(tmp_path, TARGET)


def vllm(name: str) -> str:
    return heads.vllm_name(name)


@pytest.mark.parametrize("rename", [str, vllm])
def test_vllm(tmp_path: Path, rename: Any) -> None:
    stored = make_e2(tmp_path, rename=rename)
    assert len(stored) == 12
    head = open_draft_head(tmp_path, TARGET, target_embedding=heads.embedding)
    check(head, stored, {**{name: rename(name) for name in PLAIN}, "lm_head.weight": rename("lm_head.weight")})
    assert (head.config.source_format, head.config.own_lm_head) == ("vllm-eagle", True)
    assert head.warnings == ()
    shared = open_draft_head(tmp_path, TARGET, {}, heads.embedding, heads.target_lm_head)
    check(shared, stored, {name: rename(name) for name in PLAIN})
    assert not shared.config.own_lm_head
    make_e1(tmp_path / "e1")
    official = open_draft_head(tmp_path / "e1", TARGET)
    assert official.config == DraftHeadConfig.from_json({**shared.config.to_json(), "source_format": "eagle-official"})
    assert all(torch.equal(official.tensors.load(name), shared.tensors.load(name)) for name in PLAIN)


def test_lm_head_that_is_not_the_targets_is_kept(tmp_path: Path) -> None:
    make_e2(tmp_path)
    head = open_draft_head(tmp_path, TARGET, target_lm_head=lambda: weight("another", VOCAB, HIDDEN))
    assert head.config.own_lm_head
    assert "lm_head.weight is not the target's LM head (64 of 64 rows differ" in head.warnings[0]


@pytest.mark.parametrize("rows", [64, 16])
def test_token_map(tmp_path: Path, rows: int) -> None:
    make_e2(tmp_path, mapped=True, lm_head_rows=rows)
    head = open_draft_head(tmp_path, TARGET)
    ids = heads.token_map()
    assert (head.config.draft_vocab_size, head.config.token_ids) == (16, tuple(ids))
    assert torch.equal(head.tensors.load("lm_head.weight"), heads.target_lm_head()[ids])
    assert head.tensors.tensors["lm_head.weight"].shape == (16, HIDDEN)
    assert head.warnings == ()
    shared = open_draft_head(tmp_path, TARGET, target_lm_head=heads.target_lm_head)
    assert (shared.config.own_lm_head, shared.config.token_ids) == (False, tuple(ids))
    assert DraftHeadConfig.from_json(head.config.to_json()) == head.config


def test_token_map_without_lm_head_names_rows_of_the_targets(tmp_path: Path) -> None:
    make_e2(tmp_path, mapped=True, changes={"lm_head.weight": None})
    config = open_draft_head(tmp_path, TARGET).config
    assert (config.own_lm_head, config.draft_vocab_size, config.token_ids) == (False, 16, tuple(heads.token_map()))


def test_token_map_without_a_truncated_vocabulary(tmp_path: Path) -> None:
    make_e2(tmp_path, mapped=True, outer={"truncated_vocab_size": VOCAB})
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.token_ids, head.config.draft_vocab_size) == (None, VOCAB)
    assert "token_map is ignored" in head.warnings[0]
    make_e2(tmp_path, mapped=True, lm_head_rows=16, outer={"truncated_vocab_size": VOCAB})
    assert open_draft_head(tmp_path, TARGET).config.token_ids == tuple(heads.token_map())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"changes": {"token_map": torch.arange(16) + 49}}, "ids twice or outside 0 to 63"),
        ({"changes": {"token_map": torch.zeros(16, dtype=torch.int64)}}, "ids twice or outside"),
        ({"changes": {"token_map": torch.arange(15)}}, "token_map has 15 ids, .*truncated_vocab_size 16"),
        ({"changes": {"token_map": torch.ones(16)}}, "token_map has dtype float32"),
        ({"changes": {"token_map": None}}, "truncated_vocab_size 16 of 64 tokens, but there is no token_map"),
        ({"changes": {"lm_head.weight": torch.zeros(20, HIDDEN)}}, r"lm_head\.weight has 20 rows, the target 64"),
    ],
)
def test_bad_token_map(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    make_e2(tmp_path, mapped=True, **arguments)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_draft_head(tmp_path, TARGET)
    assert "\n" not in str(raised.value)


def test_vllm_norm_slots(tmp_path: Path) -> None:
    stored = make_e2(tmp_path, slots=True)
    head = open_draft_head(tmp_path, TARGET)
    plain = {**PLAIN, "lm_head.weight": "lm_head.weight"}
    check(head, stored, plain)
    assert len(head.warnings) == 2
    make_e2(tmp_path, slots=True, config={"skip_prenorm": True, "skip_output_norm": True})
    check(open_draft_head(tmp_path, TARGET), stored, plain)
    make_e2(tmp_path, slots=True, config={"skip_prenorm": False, "skip_output_norm": False})
    applied = open_draft_head(tmp_path, TARGET)
    norms = {"layers.0.input_norm.weight": "layers.0.input_layernorm.weight", "norm.weight": "norm.weight"}
    check(applied, stored, {**plain, **norms})
    assert (applied.config.input_norm, applied.config.output_norm) == (True, True)
    assert applied.config.feedback == "post_norm"
    assert "norm_output" in applied.warnings[0]
    make_e2(tmp_path, config={"skip_prenorm": False})
    with pytest.raises(CheckpointError, match=r"no tensor layers\.0\.input_layernorm\.weight \(config.json asks"):
        open_draft_head(tmp_path, TARGET)


def test_vllm_para_norm(tmp_path: Path) -> None:
    stored = make_e2(tmp_path, para_norm=True)
    head = open_draft_head(tmp_path, TARGET)
    norms = {"embedding_norm.weight": "enorm.weight", "hidden_norm.weight": "hnorm.weight"}
    check(head, stored, {**PLAIN, "lm_head.weight": "lm_head.weight", **norms})
    assert head.warnings == ()
    make_e2(tmp_path, para_norm=True, changes={"hnorm.weight": None})
    with pytest.raises(CheckpointError, match=r"no tensor hnorm\.weight \(config\.json says add_para_norm"):
        open_draft_head(tmp_path, TARGET)
    make_e2(tmp_path, para_norm=True, config={"add_para_norm": False})
    assert len(open_draft_head(tmp_path, TARGET).warnings) == 2


def test_vllm_mixed_dtypes(tmp_path: Path) -> None:
    lm_head = heads.target_lm_head()
    half = {name: tensor.half() for name, tensor in heads.e1_tensors().items()}
    make_e2(tmp_path, changes={**half, "lm_head.weight": lm_head})
    head = open_draft_head(tmp_path, TARGET, {}, heads.embedding)
    assert head.warnings == ()
    assert head.tensors.tensors["lm_head.weight"].dtype == "float32"
    assert head.tensors.tensors["fc.weight"].dtype == "float16"


def test_vllm_bias_without_its_flag(tmp_path: Path) -> None:
    make_e2(tmp_path, bias_flag=False)
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.fc_bias
    assert "has fc bias, config.json says none" in head.warnings[0]


EXTRA_NORMS = {
    "embed_layernorm.weight": "embedding_norm.weight",
    "hidden_layernorm.weight": "layers.0.input_norm.weight",
    "lm_head_layernorm.weight": "norm.weight",
}
SPECULATORS = {
    "embed_layernorm.weight": "embedding_layernorm.weight",
    "hidden_layernorm.weight": "transformer.input_layernorm.weight",
    "lm_head_layernorm.weight": "pre_lm_head_layernorm.weight",
}


def test_eagle_with_norms(tmp_path: Path) -> None:
    stored = make_e1(tmp_path, changes={name: weight(name, HIDDEN) for name in EXTRA_NORMS})
    head = open_draft_head(tmp_path, TARGET)
    check(head, stored, {**PLAIN, **{ours: theirs for theirs, ours in EXTRA_NORMS.items()}})
    assert (head.config.source_format, head.config.feedback) == ("eagle-norms", "pre_norm")
    assert len(head.warnings) == 1
    assert "norm_output" in head.warnings[0]


def speculators_name(name: str) -> str:
    return SPECULATORS.get(name, name).replace("layers.0.", "transformer.").replace("fc.", "fusion_fc.")


def save_speculators_eagle(directory: Path, *, layernorms: bool, norms: bool, fusion_bias: bool = True) -> Any:
    changes = {name: weight(name, HIDDEN) for name in EXTRA_NORMS} if norms else {}
    config = {
        "speculators_model_type": "eagle",
        "layernorms": layernorms,
        "fusion_bias": fusion_bias,
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": heads.CONFIG,
    }
    tensors = heads.edit(heads.e1_tensors(), {**changes, "embed_tokens.weight": None})
    return heads.save_head(directory, tensors, config, rename=speculators_name)


def test_speculators_eagle(tmp_path: Path) -> None:
    stored = save_speculators_eagle(tmp_path, layernorms=False, norms=False)
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.source_format == "speculators-eagle"
    check(head, stored, {name: speculators_name(name) for name in PLAIN})
    assert head.warnings == ()
    stored = save_speculators_eagle(tmp_path, layernorms=True, norms=True)
    head = open_draft_head(tmp_path, TARGET)
    norms = {ours: speculators_name(theirs) for theirs, ours in EXTRA_NORMS.items()}
    check(head, stored, {**{name: speculators_name(name) for name in PLAIN}, **norms})
    save_speculators_eagle(tmp_path, layernorms=False, norms=True)
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.embedding_norm, head.config.input_norm, head.config.output_norm) == (False,) * 3
    assert len(head.warnings) == 3
    save_speculators_eagle(tmp_path, layernorms=True, norms=False)
    with pytest.raises(CheckpointError, match=r"config\.json says layernorms"):
        open_draft_head(tmp_path, TARGET)
