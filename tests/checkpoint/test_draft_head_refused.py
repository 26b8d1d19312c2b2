"""Draft heads that are damaged, incomplete, another target's or not supported: one clear line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import heads
import huggingface_hub
import pytest
import torch
from heads import DRAFT_VOCAB, HIDDEN, VOCAB, make_e1, make_e2, make_e3, make_e4, target_config, weight

from trtspec.checkpoint.draft_head import OPTIONS, open_draft_head
from trtspec.errors import CheckpointError, ConfigError, UserError

TARGET = target_config()


def refusal(directory: Path, target: Any = TARGET, **options: str) -> str:
    """The message with which a head is refused; it has one line and isn't endless."""
    with pytest.raises(UserError) as raised:
        open_draft_head(directory, target, options)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize("name", [name for name in heads.e1_tensors() if name != "embed_tokens.weight"])
def test_eagle_without_a_tensor(tmp_path: Path, name: str) -> None:
    make_e1(tmp_path, changes={name: None}, config={"bias": True})
    if name == "fc.bias":
        assert len(open_draft_head(tmp_path, TARGET).warnings) == 1
    else:
        assert any(part in refusal(tmp_path) for part in (name, "post_attention_layernorm"))


@pytest.mark.parametrize("name", [name for name in heads.e3_tensors() if name not in ("t2d", "d2t")])
def test_eagle3_without_a_tensor(tmp_path: Path, name: str) -> None:
    make_e3(tmp_path, changes={name: None})
    assert name in refusal(tmp_path)


@pytest.mark.parametrize("name", heads.e1_tensors(layers=2))
def test_eagle_with_a_tensor_of_another_shape(tmp_path: Path, name: str) -> None:
    shape = heads.e1_tensors(layers=2)[name].shape
    make_e1(tmp_path, layers=2, changes={name: torch.zeros(*(size + 2 for size in shape))})
    assert any(word in refusal(tmp_path) for word in ("expected", "rows", "vocabulary", "needs"))


@pytest.mark.parametrize("name", [name for name in heads.e3_tensors() if name != "t2d"])
def test_eagle3_with_a_tensor_of_another_shape(tmp_path: Path, name: str) -> None:
    tensor = heads.e3_tensors()[name]
    make_e3(tmp_path, changes={name: torch.zeros([size + 2 for size in tensor.shape], dtype=tensor.dtype)})
    assert refusal(tmp_path)


@pytest.mark.parametrize("name", ["fc.weight", "layers.0.mlp.up_proj.weight", "norm.weight"])
def test_weights_that_are_no_floats(tmp_path: Path, name: str) -> None:
    tensor = heads.e3_tensors()[name]
    make_e3(tmp_path, changes={name: tensor.to(torch.int8)})
    assert "has dtype int8; supported: float32, float16, bfloat16" in refusal(tmp_path)


@pytest.mark.parametrize("extra", ["layers.0.self_attn.rotary.weight", "fc2.weight", "layers.0.mlp.gate_proj.scale"])
def test_tensors_left_over(tmp_path: Path, extra: str) -> None:
    make_e3(tmp_path, names="layers.0", changes={extra: torch.zeros(3)})
    assert f"has a tensor {extra}, which an eagle3 head" in refusal(tmp_path)


def test_tensors_that_may_be_left_over(tmp_path: Path) -> None:
    extra = {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "verifier_norm.weight": torch.zeros(32)}
    make_e3(tmp_path, names="layers.0", changes=extra)
    head = open_draft_head(tmp_path, TARGET, {"aux_layers": "2,4,5"})
    assert head.warnings == ("verifier_norm.weight is ignored: it is the target's",)


@pytest.mark.parametrize(
    ("d2t", "words"),
    [
        (torch.arange(DRAFT_VOCAB), "untouched default that would double every id"),
        (torch.zeros(DRAFT_VOCAB, dtype=torch.int64), "all zeros, which fits only a head with all 64 tokens, not 40"),
        (torch.tensor(heads.draft_ids()), "d2t holds absolute ids; expected offsets"),
        (torch.arange(DRAFT_VOCAB).flip(0), "out of order or out of range"),
        (torch.full((DRAFT_VOCAB,), -1), "out of order or out of range"),
        (torch.full((DRAFT_VOCAB,), 25), "out of order or out of range"),
        (torch.ones(DRAFT_VOCAB), "d2t has dtype float32"),
        (torch.ones(DRAFT_VOCAB - 1, dtype=torch.int64), "d2t has 39 entries, the LM head 40 rows"),
        (torch.ones(DRAFT_VOCAB, dtype=torch.int64), "t2d marks 40 tokens, not the 40 that d2t gives"),
        (torch.ones(DRAFT_VOCAB, 1, dtype=torch.int64), "expected one axis"),
        (None, "40 of 64 tokens but no d2t"),
    ],
)
def test_bad_d2t(tmp_path: Path, d2t: torch.Tensor | None, words: str) -> None:
    make_e3(tmp_path, changes={"d2t": d2t})
    assert words in refusal(tmp_path)


def test_d2t_of_int32_without_t2d(tmp_path: Path) -> None:
    make_e3(tmp_path, maps=["d2t"], changes={"d2t": heads.e3_tensors()["d2t"].int()})
    assert open_draft_head(tmp_path, TARGET).config.token_ids == tuple(heads.draft_ids())


def test_d2t_of_a_whole_vocabulary(tmp_path: Path) -> None:
    make_e3(tmp_path, draft_vocab=VOCAB, changes={"d2t": torch.arange(VOCAB)})
    assert "untouched default" in refusal(tmp_path)


def test_no_lm_head(tmp_path: Path) -> None:
    make_e3(tmp_path, changes={"lm_head.weight": None})
    assert "no tensor lm_head.weight (the target's serves only heads with its 64 tokens" in refusal(tmp_path)
    make_e3(tmp_path, changes={"lm_head.weight": None}, without=["draft_vocab_size"])
    assert "no tensor lm_head.weight" in refusal(tmp_path)


def test_draft_vocabulary_that_config_has_wrong(tmp_path: Path) -> None:
    make_e3(tmp_path, config={"draft_vocab_size": 32000})
    head = open_draft_head(tmp_path, TARGET)
    assert head.config.draft_vocab_size == DRAFT_VOCAB
    assert "draft_vocab_size 32000, the tensors show 40" in head.warnings[0]


@pytest.mark.parametrize("make", [make_e1, make_e2, make_e3, make_e4])
def test_another_vocabulary(tmp_path: Path, make: Any) -> None:
    make(tmp_path)
    message = refusal(tmp_path, target_config(vocab_size=70))
    assert "is for a vocabulary of 64 tokens, the target has 70; use the head of this target" in message


@pytest.mark.parametrize("make", [make_e1, make_e2, make_e3, make_e4])
def test_another_vocabulary_by_config_alone(tmp_path: Path, make: Any) -> None:
    make(tmp_path, changes={"embed_tokens.weight": None, "t2d": None})
    message = refusal(tmp_path, target_config(vocab_size=70))
    assert "config.json is for a vocabulary of 64 tokens, the target has 70" in message


def test_vocabulary_that_config_has_wrong(tmp_path: Path) -> None:
    make_e1(tmp_path, config={"vocab_size": 99})
    assert open_draft_head(tmp_path, TARGET).warnings == ("config.json says vocab_size 99, the tensors show 64",)


@pytest.mark.parametrize("make", [make_e1, make_e2])
def test_eagle_of_another_width(tmp_path: Path, make: Any) -> None:
    make(tmp_path)
    message = refusal(tmp_path, target_config(hidden_size=48))
    assert "the draft head has hidden size 32 (for a target of 32), the target has 48" in message


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        (40, "is for a target of hidden size 32 (its fc.weight takes 96 columns), the target has 40"),
        (48, "takes 2 features of the target's hidden size 48, but there are 3 boundaries: 2, 4, 5"),
        (16, "takes 6 features of the target's hidden size 16"),
    ],
)
def test_eagle3_of_another_width(tmp_path: Path, hidden: int, words: str) -> None:
    make_e3(tmp_path)
    assert words in refusal(tmp_path, target_config(hidden_size=hidden))
    make_e3(tmp_path, config={"target_hidden_size": 32})
    assert "is for a target of hidden size 32" in refusal(tmp_path, target_config(hidden_size=hidden))


@pytest.mark.parametrize(
    ("names", "changes", "words"),
    [
        ("layers.0", {"layers.0.hidden_norm.weight": None}, "attends over 64 = 2 x 32 columns"),
        ("layers.0", {"layers.0.hidden_norm.weight": None, "fc.weight": None}, "attends over 64 = 2 x 32 columns"),
        ("midlayer", {"layers.0.hidden_norm.weight": None}, "no tensor layers.0.hidden_norm.weight"),
        ("midlayer", {"mask_hidden": torch.zeros(32)}, "P-EAGLE"),
        ("midlayer", {"eh_proj.weight": torch.zeros(32, 64)}, "eh_proj"),
        ("midlayer", {"enorm.weight": torch.zeros(32)}, "use_mtp_layernorm"),
        ("layers.0", {"layers.0.self_attn.q_a_proj.weight": torch.zeros(8, 64)}, "latent attention"),
        ("layers.0", {"layers.0.mlp.experts.0.up_proj.weight": torch.zeros(8, 64)}, "mixture-of-experts"),
    ],
)
def test_incomplete_or_unsupported(tmp_path: Path, names: str, changes: Any, words: str) -> None:
    make_e3(tmp_path, names=names, changes=changes)
    assert words in refusal(tmp_path)


def test_whole_model(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in TARGET.weight_shapes().items()}
    heads.save_head(tmp_path, tensors, heads.CONFIG)
    assert "this is no EAGLE draft head" in refusal(tmp_path)
    make_e1(tmp_path / "fc", changes={"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN)})
    assert "fc.weight has shape [32, 96], an EAGLE-1 head without hidden_norm needs [32, 64]" in refusal(
        tmp_path / "fc"
    )


def test_speculators_types(tmp_path: Path) -> None:
    make_e4(tmp_path, config={"speculators_model_type": "peagle"})
    assert "speculators_model_type 'peagle' is not supported; supported: eagle, eagle3" in refusal(tmp_path)
    make_e4(tmp_path, config={"speculators_model_type": "eagle"})
    assert "says speculators_model_type 'eagle', the tensors are those of an eagle3 head" in refusal(tmp_path)
    make_e4(tmp_path, config={"transformer_layer_config": [1]})
    assert "transformer_layer_config is a list, expected an object" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp 2"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"num_attention_heads": None}, "no 'num_attention_heads'"),
        ({"num_attention_heads": 3}, "32 rows"),
        ({"num_attention_heads": "two"}, "num_attention_heads is 'two', expected an integer"),
        ({"head_dim": 8}, "which are not 2 and 1 heads of 8"),
        ({"num_attention_heads": 1}, "which are not 1 and 1 heads of 32"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"norm_output": "yes"}, "norm_output is 'yes', expected true or false"),
        ({"eagle_config": 3}, "eagle_config is a int"),
        ({"norm_output": True, "eagle_config": {"norm_output": False}}, "contradicts itself: norm_output true, eagle_"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": 4}, "rope_scaling is a int"),
        ({"rope_theta": "large"}, "the rotary embedding's fields are malformed"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling is linear, rope_parameters default",
        ),
    ],
)
def test_bad_fields(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    make_e3(tmp_path, config=config)
    assert words in refusal(tmp_path)


def test_layers_with_a_gap(tmp_path: Path) -> None:
    later = heads.later_layer(2)
    make_e4(tmp_path, changes=later)
    assert "layers [0, 2], expected 0 onwards without a gap" in refusal(tmp_path)


def test_no_layers(tmp_path: Path) -> None:
    make_e3(tmp_path, rename=lambda name: name if "hidden_norm" in name else name.replace("midlayer", "blocks.0"))
    assert "no tensor layers.0.self_attn.q_proj.weight" in refusal(tmp_path)


def test_heads_that_attention_can_not_have(tmp_path: Path) -> None:
    make_e3(tmp_path, head_dim=15)
    assert "2 heads on 1 key/value heads of 15: not supported" in refusal(tmp_path)


def test_draft_vocabulary_above_the_targets(tmp_path: Path) -> None:
    make_e3(tmp_path, draft_vocab=70)
    assert "lm_head.weight has 70 rows, the target 64 tokens" in refusal(tmp_path)


def test_layers_that_differ(tmp_path: Path) -> None:
    make_e4(tmp_path, layers=2, qk_norm=True)
    assert "but no layers.1.self_attn.q_norm.weight" in refusal(tmp_path)


def test_options(tmp_path: Path) -> None:
    make_e1(tmp_path)
    assert "'nonsense' is unknown; choose one of: aux_layers" in refusal(tmp_path, nonsense="1")
    for key, text in (
        ("aux_layers", "4,2"),
        ("norm_output", "maybe"),
        ("rope_theta", "-1"),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", "nan"),
        ("max_positions", "0"),
        ("embedding", "mine"),
        ("rope_scaling", "yarn"),
    ):
        assert f"EAGLE option {key} is {text!r}; expected" in refusal(tmp_path, **{key: text})
    for key in ("aux_layers", "norm_before_residual", "double_hidden_norm"):
        value = "2,4,5" if key == "aux_layers" else "true"
        assert f"EAGLE option {key} is for eagle3 heads" in refusal(tmp_path, **{key: value})
    make_e3(tmp_path)
    assert "EAGLE option input_norm is for eagle heads" in refusal(tmp_path, input_norm="true")
    assert "embedding=head: the draft head has no embed_tokens.weight" in refusal(tmp_path, embedding="head")
    assert all(option.help for option in OPTIONS.values())


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist; expected a draft head's directory or a hub id" in refusal(tmp_path / "absent")
    (tmp_path / "file.bin").write_bytes(b"")
    assert "is a file; give the directory" in refusal(tmp_path / "file.bin")
    assert "has no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "has no weights" in refusal(tmp_path)
    make_e1(tmp_path / "head")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(tmp_path / "head"))
    assert open_draft_head("owner/head", TARGET).config.kind == "eagle"


def test_damaged_files(tmp_path: Path) -> None:
    make_e3(tmp_path, safetensors=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    assert "truncated" in refusal(tmp_path)
    make_e1(tmp_path / "bin")
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"PK\x03\x04 nothing")
    assert "damaged" in refusal(tmp_path / "bin")
    make_e1(tmp_path / "json")
    (tmp_path / "json" / "config.json").write_text(json.dumps([1]))
    assert "holds a JSON list" in refusal(tmp_path / "json")


def test_errors_are_of_the_right_kind(tmp_path: Path) -> None:
    make_e3(tmp_path, changes={"norm.weight": None}, config={"use_last_layernorm": False})
    with pytest.raises(ConfigError, match=r"output_norm=true: the draft head has no norm\.weight"):
        open_draft_head(tmp_path, TARGET, {"output_norm": "true"})
    make_e3(tmp_path, changes={"fc.weight": weight("x", 3)})
    with pytest.raises(CheckpointError, match=r"fc\.weight has shape \[3\], expected a matrix"):
        open_draft_head(tmp_path, TARGET)
