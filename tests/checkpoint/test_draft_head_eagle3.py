"""EAGLE-3 heads: the official format, exporters' variants of it, and speculators', as one canonical record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from heads import BOUNDARIES, DRAFT_VOCAB, HIDDEN, VOCAB, make_e3, make_e4, target_config, weight

from trtspec.checkpoint.draft_head import DraftHead, DraftHeadConfig, open_draft_head, weight_shapes
from trtspec.errors import CheckpointError, ConfigError

TARGET = target_config()
RENAMED = {
    "layers.0.input_layernorm.weight": "embedding_norm.weight",
    "layers.0.hidden_norm.weight": "hidden_norm.weight",
}
UNUSED = ("d2t", "t2d", "embed_tokens.weight")
IDS = "eagle_aux_hidden_state_layer_ids"


def canonical(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stored tensors by the canonical name that they should get."""
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return {RENAMED.get(name, name): tensor for name, tensor in named.items() if name not in UNUSED}


def check(head: DraftHead, expected: dict[str, torch.Tensor]) -> None:
    """The head has these tensors under canonical names and no others."""
    assert set(head.tensors.tensors) == set(expected)
    assert list(head.tensors.tensors) == list(weight_shapes(head.config))
    for name, tensor in expected.items():
        assert torch.equal(head.tensors.load(name), tensor), name
        assert tuple(tensor.shape) == weight_shapes(head.config)[name]


def origins(head: DraftHead) -> dict[str, str]:
    return {decision.name: decision.origin for decision in head.decisions}


def test_official(tmp_path: Path) -> None:
    stored = make_e3(tmp_path)
    assert len(stored) == 15
    head = open_draft_head(tmp_path, TARGET, target_embedding=heads.embedding)
    check(head, canonical(stored))
    assert head.warnings == ()
    config = head.config
    assert (config.kind, config.source_format, config.feature) == ("eagle3", "eagle3-official", "boundaries")
    assert (config.boundaries, config.num_features, config.feature_norm) == (BOUNDARIES, 3, "none")
    assert (config.embedding_norm, config.hidden_norm, config.input_norm, config.output_norm) == (
        True,
        True,
        False,
        True,
    )
    assert (config.residual, config.feedback, config.fc_bias) == ("raw", "pre_norm", False)
    assert (config.own_embedding, config.own_lm_head, config.draft_vocab_size) == (False, True, DRAFT_VOCAB)
    assert config.token_ids == tuple(heads.draft_ids())
    assert weight_shapes(config)["layers.0.self_attn.k_proj.weight"] == (16, 64)
    assert origins(head)["boundaries"] == origins(head)["residual"] == "default"
    assert DraftHeadConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("safetensors", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copy_of_the_embedding_is_shared(tmp_path: Path, safetensors: bool, dtype: torch.dtype) -> None:
    stored = make_e3(tmp_path, with_embedding=True, safetensors=safetensors, dtype=dtype)
    assert len(stored) == 16
    head = open_draft_head(tmp_path, TARGET, target_embedding=heads.embedding)
    check(head, canonical(stored))
    assert head.warnings == ()
    assert not head.config.own_embedding


def test_another_embedding(tmp_path: Path) -> None:
    other = heads.embedding()
    other[5] = torch.randn(HIDDEN)
    make_e3(tmp_path, changes={"embed_tokens.weight": other})
    head = open_draft_head(tmp_path, TARGET, target_embedding=heads.embedding)
    assert not head.config.own_embedding
    assert "embed_tokens.weight is not the target's embedding table (1 of 64 rows differ" in head.warnings[0]
    chosen = open_draft_head(tmp_path, TARGET, {"embedding": "head"}, heads.embedding)
    assert (chosen.config.own_embedding, chosen.warnings) == (True, ())
    assert torch.equal(chosen.tensors.load("embed_tokens.weight"), other)
    assert open_draft_head(tmp_path, TARGET).warnings == ()
    make_e4(tmp_path, changes={"embed_tokens.weight": other}, config={"embed_requires_grad": True})
    (tmp_path / "pytorch_model.bin").unlink()
    assert open_draft_head(tmp_path, TARGET, target_embedding=heads.embedding).config.own_embedding


def test_narrower_head(tmp_path: Path) -> None:
    target = target_config(hidden_size=48)
    stored = make_e3(tmp_path, target_hidden=48, with_embedding=True)
    head = open_draft_head(tmp_path, target, target_embedding=lambda: pytest.fail("compared"))
    check(head, {**canonical(stored), "embed_tokens.weight": stored["embed_tokens.weight"]})
    assert (head.config.hidden_size, head.config.target_hidden_size, head.config.own_embedding) == (32, 48, True)
    assert weight_shapes(head.config)["fc.weight"] == (32, 144)
    with pytest.raises(ConfigError, match="embedding=target: the head needs rows of 32, the target's have 48"):
        open_draft_head(tmp_path, target, {"embedding": "target"})
    make_e3(tmp_path, target_hidden=48)
    with pytest.raises(CheckpointError, match=r"no tensor embed_tokens\.weight \(hidden size 32 is not the target's"):
        open_draft_head(tmp_path, target)


@pytest.mark.parametrize("zeros", [True, False])
def test_whole_vocabulary(tmp_path: Path, zeros: bool) -> None:
    changes = {"d2t": torch.zeros(VOCAB, dtype=torch.int64)} if zeros else {}
    make_e3(tmp_path, draft_vocab=VOCAB, changes=changes)
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.token_ids, head.config.draft_vocab_size) == (None, VOCAB)
    make_e3(tmp_path, draft_vocab=VOCAB, without=["draft_vocab_size"], changes={"lm_head.weight": None})
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.own_lm_head, head.config.draft_vocab_size) == (False, VOCAB)
    assert "lm_head.weight" not in head.tensors.tensors


def test_head_dim(tmp_path: Path) -> None:
    stored = make_e3(tmp_path, head_dim=24)
    head = open_draft_head(tmp_path, TARGET)
    check(head, canonical(stored))
    assert weight_shapes(head.config)["layers.0.self_attn.o_proj.weight"] == (32, 48)
    assert origins(head)["head_dim"] == "config"
    make_e3(tmp_path, head_dim=24, without=["head_dim"])
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.head_dim, origins(head)["head_dim"]) == (24, "tensor")


def test_one_layer_where_config_says_forty(tmp_path: Path) -> None:
    make_e3(tmp_path, config={"num_hidden_layers": 40})
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.num_layers == 1
    assert head.warnings == ("config.json says num_hidden_layers 40, the tensors show 1: the tensors are followed",)


def nvidia(tmp_path: Path, **arguments: Any) -> Any:
    config = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS: [1, 3, 4]}}
    return make_e3(
        tmp_path,
        **{
            "names": "layers.0",
            "maps": ["d2t"],
            "safetensors": True,
            **arguments,
            "config": {**config, **arguments.get("config", {})},
        },
    )


def test_nvidia(tmp_path: Path) -> None:
    stored = nvidia(tmp_path)
    head = open_draft_head(tmp_path, TARGET)
    check(head, canonical(stored))
    assert (head.config.source_format, head.config.boundaries, head.warnings) == ("eagle3-nvidia", BOUNDARIES, ())
    assert origins(head)["boundaries"] == "config"
    nvidia(tmp_path, config={"eagle_config": {"use_last_layernorm": True}})
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.boundaries, origins(head)["boundaries"]) == (BOUNDARIES, "default")
    assert len(head.warnings) == 1
    assert "aux_layers" in head.warnings[0]
    nvidia(tmp_path, config={"norm_before_residual": True})
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.residual == "normed"
    assert "norm_before_residual true" in head.warnings[0]


@pytest.mark.parametrize(
    ("ids", "boundaries", "warned"),
    [
        ([1, 3, 4], (2, 4, 5), False),
        ([2, 4, 5], (2, 4, 5), False),
        ([2, 4, 8], (2, 4, 8), False),
        ([5, 2, 4], (2, 4, 5), True),
        ([0, 3, 4], (0, 3, 4), False),
    ],
)
def test_layer_ids(tmp_path: Path, ids: list[int], boundaries: tuple[int, ...], warned: bool) -> None:
    nvidia(tmp_path, config={IDS: ids, "eagle_config": {}})
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.boundaries == boundaries
    assert bool(head.warnings) == warned
    chosen = open_draft_head(tmp_path, TARGET, {"aux_layers": "1, 6,8"})
    assert (chosen.config.boundaries, origins(chosen)["boundaries"]) == ((1, 6, 8), "option")


@pytest.mark.parametrize("ids", [[1, 1, 4], [2, 4, 9], [-1, 2, 3], [2, 4], "2,4,5", [], [2, 4, True]])
def test_bad_layer_ids(tmp_path: Path, ids: Any) -> None:
    nvidia(tmp_path, config={"eagle_config": {IDS: ids}})
    with pytest.raises(CheckpointError, match="aux_layers"):
        open_draft_head(tmp_path, TARGET)
    assert open_draft_head(tmp_path, TARGET, {"aux_layers": "2,4,5"}).config.boundaries == BOUNDARIES


@pytest.mark.parametrize("aux_layers", ["2,4", "2,4,9", "2,4,5,6"])
def test_aux_layers_that_do_not_fit(tmp_path: Path, aux_layers: str) -> None:
    nvidia(tmp_path)
    with pytest.raises(ConfigError, match=r"boundaries.*\(option\)"):
        open_draft_head(tmp_path, TARGET, {"aux_layers": aux_layers})


def test_shallow_targets(tmp_path: Path) -> None:
    make_e3(tmp_path, features=2)
    assert open_draft_head(tmp_path, target_config(num_layers=6)).config.boundaries == (2, 3)
    make_e3(tmp_path)
    with pytest.raises(CheckpointError, match=r"takes 3 features .* but there are 2 boundaries: 2, 3 \(default\)"):
        open_draft_head(tmp_path, target_config(num_layers=6))
    with pytest.raises(CheckpointError, match="don't fit a target of 2 layers"):
        open_draft_head(tmp_path, target_config(num_layers=2))


def test_four_features(tmp_path: Path) -> None:
    nvidia(tmp_path, features=4, config={"eagle_config": {IDS: [2, 4, 5, 8]}, "num_aux_layers": 3})
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.boundaries == (2, 4, 5, 8)
    assert "num_aux_layers 3, fc.weight takes 4" in head.warnings[0]


def test_without_fc(tmp_path: Path) -> None:
    nvidia(tmp_path, changes={"fc.weight": None}, config={"eagle_config": {"use_aux_hidden_state": False}})
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.has_fc, head.config.feature, head.config.boundaries) == (False, "post_norm", ())
    assert (head.config.hidden_size, "fc.weight" in head.tensors.tensors) == (HIDDEN, False)
    with pytest.raises(ConfigError, match="aux_layers: this head has no fc"):
        open_draft_head(tmp_path, TARGET, {"aux_layers": "2,4,5"})
    with pytest.raises(CheckpointError, match=r"has hidden size 32 .* the target has 48"):
        open_draft_head(tmp_path, target_config(hidden_size=48))
    nvidia(tmp_path, changes={"fc.weight": None})
    with pytest.raises(CheckpointError, match=r"no tensor fc\.weight \(only heads with use_aux_hidden_state false"):
        open_draft_head(tmp_path, TARGET)
    nvidia(tmp_path, config={"eagle_config": {"use_aux_hidden_state": False}})
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.has_fc
    assert "it is used" in head.warnings[0]


def test_speculators(tmp_path: Path) -> None:
    stored = make_e4(tmp_path)
    assert len(stored) == 16
    head = open_draft_head(tmp_path, TARGET, target_embedding=heads.embedding)
    check(head, canonical(stored))
    assert (head.config.source_format, head.warnings) == ("eagle3-speculators", ())
    assert origins(head)["residual"] == origins(head)["feedback"] == origins(head)["boundaries"] == "config"
    make_e3(tmp_path / "e3")
    official = open_draft_head(tmp_path / "e3", TARGET)
    assert {**official.config.to_json(), "source_format": ""} == {**head.config.to_json(), "source_format": ""}
    assert all(torch.equal(official.tensors.load(name), head.tensors.load(name)) for name in official.tensors.tensors)


@pytest.mark.parametrize("kind", ["whole", "per_feature"])
def test_feature_norms(tmp_path: Path, kind: str) -> None:
    stored = make_e4(tmp_path, feature_norm=kind)
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.feature_norm, head.warnings) == (kind, ())
    expected = canonical({n.replace("fc_norm.", "feature_norm."): t for n, t in stored.items()})
    if kind == "whole":
        expected["feature_norm.weight"] = expected.pop("input_norm.weight")
    check(head, expected)
    flag = "norm_before_fc" if kind == "whole" else "fc_norm"
    make_e4(tmp_path, feature_norm=kind, config={flag: False})
    assert f"config.json says {flag} false" in open_draft_head(tmp_path, TARGET).warnings[0]
    make_e4(tmp_path, config={flag: True})
    with pytest.raises(CheckpointError, match=r"no tensor (input_norm|fc_norm\.0)\.weight \(config.json asks"):
        open_draft_head(tmp_path, TARGET)


def test_feature_norms_that_do_not_fit(tmp_path: Path) -> None:
    make_e4(tmp_path, feature_norm="whole", changes={"fc_norm.0.weight": weight("x", HIDDEN)})
    with pytest.raises(CheckpointError, match=r"both fc_norm .* and input_norm"):
        open_draft_head(tmp_path, TARGET)
    make_e4(tmp_path, feature_norm="per_feature", changes={"fc_norm.1.weight": None})
    with pytest.raises(CheckpointError, match=r"has fc_norm \[0, 2\], expected one for each of 3"):
        open_draft_head(tmp_path, TARGET)


@pytest.mark.parametrize("place", ["norm_before_fc", "eagle_config"])
def test_norm_before_fc_inside_eagle_config(tmp_path: Path, place: str) -> None:
    config: dict[str, Any] = {IDS: [2, 4, 8]}
    config = (
        {**config, place: True} if place != "eagle_config" else {"eagle_config": {**config, "norm_before_fc": True}}
    )
    nvidia(tmp_path, changes={"input_norm.weight": weight("input_norm.weight", 96)}, config=config)
    assert open_draft_head(tmp_path, TARGET).config.feature_norm == "whole"


def test_norm_output(tmp_path: Path) -> None:
    make_e4(tmp_path, config={"norm_output": True})
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.feedback, origins(head)["feedback"], head.warnings) == ("post_norm", "config", ())
    assert open_draft_head(tmp_path, TARGET, {"norm_output": "false"}).config.feedback == "pre_norm"
    nvidia(tmp_path / "n", config={"eagle_config": {IDS: [1, 3, 4], "return_hidden_post_norm": True}})
    assert open_draft_head(tmp_path / "n", TARGET).config.feedback == "post_norm"
    make_e3(tmp_path / "s", config={"architectures": ["LlamaForCausalLMEagle3"], "norm_output": True})
    head = open_draft_head(tmp_path / "s", TARGET)
    assert (head.config.source_format, head.config.feedback) == ("eagle3-specforge", "post_norm")
    assert "before September 2026" in head.warnings[0]


def test_residual(tmp_path: Path) -> None:
    make_e4(tmp_path, config={"norm_before_residual": True})
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.residual, head.warnings) == ("normed", ())
    make_e4(tmp_path, without=["norm_before_residual"])
    head = open_draft_head(tmp_path, TARGET)
    assert (head.config.residual, origins(head)["residual"]) == ("raw", "default")
    assert "no norm_before_residual, whose default differs" in head.warnings[0]
    head = open_draft_head(tmp_path, TARGET, {"norm_before_residual": "true"})
    assert (head.config.residual, origins(head)["residual"], head.warnings) == ("normed", "option", ())


def test_last_norm(tmp_path: Path) -> None:
    nvidia(tmp_path, config={"eagle_config": {IDS: [1, 3, 4], "use_last_layernorm": False}})
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.output_norm
    assert "use_last_layernorm false, but there is a norm.weight" in head.warnings[0]
    assert not open_draft_head(tmp_path, TARGET, {"output_norm": "false"}).config.output_norm
    config = {"eagle_config": {IDS: [1, 3, 4], "use_last_layernorm": False}}
    nvidia(tmp_path, changes={"norm.weight": None}, config=config)
    assert not open_draft_head(tmp_path, TARGET).config.output_norm
    nvidia(tmp_path, changes={"norm.weight": None}, config={**config, "norm_output": True})
    with pytest.raises(CheckpointError, match="asks to feed back the normed hidden state"):
        open_draft_head(tmp_path, TARGET)
    nvidia(tmp_path, changes={"norm.weight": None})
    with pytest.raises(CheckpointError, match=r"no tensor norm\.weight \(only heads with use_last_layernorm false"):
        open_draft_head(tmp_path, TARGET)


@pytest.mark.parametrize("norm", ["input_layernorm", "hidden_norm"])
def test_later_layers(tmp_path: Path, norm: str) -> None:
    changes = {} if norm == "input_layernorm" else {f"layers.1.{norm}.weight": weight("n", HIDDEN)}
    changes |= {} if norm == "input_layernorm" else {"layers.1.input_layernorm.weight": None}
    stored = make_e4(tmp_path, layers=2, changes=changes)
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.num_layers == 2
    expected = canonical(stored)
    expected["layers.1.input_norm.weight"] = expected.pop(f"layers.1.{norm}.weight")
    check(head, expected)
    assert weight_shapes(head.config)["layers.1.self_attn.q_proj.weight"] == (32, 32)


def test_numbered_midlayers(tmp_path: Path) -> None:
    make_e4(tmp_path / "e4", layers=2)
    later = {
        **heads.later_layer(),
        "layers.1.hidden_norm.weight": heads.later_layer()["layers.1.input_layernorm.weight"],
    }
    del later["layers.1.input_layernorm.weight"]
    make_e3(
        tmp_path / "m", names="midlayer.0", changes=later, rename=lambda name: name.replace("layers.1", "midlayer.1")
    )
    ours, twin = (open_draft_head(tmp_path / name, TARGET) for name in ("m", "e4"))
    check(ours, {name: twin.tensors.load(name) for name in twin.tensors.tensors})


def test_qk_norm_and_bias(tmp_path: Path) -> None:
    stored = make_e4(tmp_path, qk_norm=True, bias=True, layer_config={"model_type": "qwen3", "attention_bias": True})
    head = open_draft_head(tmp_path, TARGET)
    check(head, canonical(stored))
    assert (head.config.qk_norm, head.config.qkv_bias, head.warnings) == (True, True, ())


def test_double_hidden_norm(tmp_path: Path) -> None:
    nvidia(tmp_path)
    assert not open_draft_head(tmp_path, TARGET).config.double_hidden_norm
    assert open_draft_head(tmp_path, TARGET, {"double_hidden_norm": "true"}).config.double_hidden_norm


def test_speculators_ids_are_boundaries(tmp_path: Path) -> None:
    make_e4(tmp_path, config={IDS: [1, 3, 4]})
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.boundaries == (1, 3, 4)
    assert "starts with 1" in head.warnings[0]


@pytest.mark.parametrize("prefix", ["model.", "module."])
def test_prefixes(tmp_path: Path, prefix: str) -> None:
    make_e4(tmp_path / "e4")
    make_e3(tmp_path / "p", names="layers.0", rename=lambda name: prefix + name)
    ours, twin = (open_draft_head(tmp_path / name, TARGET) for name in ("p", "e4"))
    check(ours, {name: twin.tensors.load(name) for name in twin.tensors.tensors})
    assert ours.config.token_ids == twin.config.token_ids
    assert ours.config.source_format == ("eagle3-automodel" if prefix == "model." else "eagle3-nvidia")


def test_vllm_names(tmp_path: Path) -> None:
    make_e4(tmp_path / "e4")
    tensors = heads.fuse(heads.e3_tensors())
    tensors = {
        name.replace("d2t", "draft_id_to_target_id"): tensor for name, tensor in tensors.items() if name != "t2d"
    }
    config = {**heads.CONFIG, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCAB}
    heads.save_head(tmp_path / "v", tensors, config, rename=lambda name: f"model.{name}")
    ours, twin = (open_draft_head(tmp_path / name, TARGET) for name in ("v", "e4"))
    check(ours, {name: twin.tensors.load(name) for name in twin.tensors.tensors})
    assert (ours.config.token_ids, ours.config.source_format) == (twin.config.token_ids, "eagle3-vllm")
