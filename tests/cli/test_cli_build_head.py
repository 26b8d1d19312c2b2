"""`trtspec build --eagle`: the plan in words, what is refused, and what `trtspec inspect` shows of the result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from checkpoint import heads
from checkpoint.heads import DRAFT_VOCAB, VOCAB, make_e1, make_e3
from head_targets import save_head_target
from invocation import Invoke, Result, assert_done, assert_refused, names

from trtspec.engine_dir import EngineDir

LIMITS = ("--max-seq-len", 64, "--max-batch-size", 2, "--max-draft-tokens", 6)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target") / "target"
    save_head_target(directory)
    return directory


class Builder:
    """Builds heads in `place` into `place`/out."""

    def __init__(self, trtspec: Invoke, target: Path, place: Path) -> None:
        self._trtspec, self._target = trtspec, target
        self.head, self.output, self.place = place / "head", place / "out", place

    def build(self, *args: object) -> Result:
        return self._trtspec("build", self._target, "--output", self.output, *LIMITS, *args)

    def refused(self, *words: str, args: tuple[object, ...] = ()) -> None:
        """A build with the head is refused with these words and leaves nothing."""
        before = names(self.place)
        assert_refused(self.build("--eagle", self.head, *args), *words)
        assert names(self.place) == before


@pytest.fixture
def builder(trtspec: Invoke, target: Path, tmp_path: Path) -> Builder:
    return Builder(trtspec, target, tmp_path)


def test_build_and_inspect(builder: Builder, trtspec: Invoke) -> None:
    make_e3(builder.head)
    result = builder.build("--eagle", builder.head, "--draft-vocab", 12, "--eagle-option", "rope_theta=5000")
    assert result.code == 0, result
    assert "draft head 0 MB, KV cache" in result.out
    made = EngineDir.load(builder.output)
    (found,) = trtspec("inspect", builder.output, "--json").lines
    assert found["methods"] == ["none", "ngram", "eagle", "ngram-eagle"]
    head = found["draft_head"]
    assert (head["name"], head["origin"], head["lm_head"]) == ("head", str(builder.head), "reduced")
    assert made.draft_head is not None
    assert head["config"] == {name: value for name, value in made.draft_head.config.items() if name != "token_ids"}
    assert 12 <= head["config"]["draft_vocab_size"] <= 13
    assert head["decisions"]["boundaries"]["value"] == [2, 4, 5]
    assert head["decisions"]["rope_theta"] == {"value": 5000.0, "origin": "option"}
    file = "weights/draft_lm_head.safetensors"
    assert head["parts"] == {"lm_head": file, "token_ids": file}
    assert set(found["runtimes"]["onnxruntime"]["graphs"]) == {
        *("target", "lm_head", "draft_head", "fuse", "draft_lm_head")
    }
    text = trtspec("inspect", builder.output)
    assert_done(text)
    assert "draft_head:\n  name: head\n" in text.out


def test_dry_run_prints_the_wiring(builder: Builder) -> None:
    make_e3(builder.head)
    result = builder.build("--eagle", builder.head, "--dry-run")
    assert_done(result)
    assert names(builder.place) == ["head"]
    lines = result.out.splitlines()
    kv = 2 * heads.KV_HEADS * heads.HEAD_DIM * 4 * (64 + 128)
    (head,) = [line for line in lines if line.startswith("draft head")]
    assert head.startswith(f"draft head        head, from {builder.head}: 0.1 MB")
    assert head.endswith(f"KV cache {kv / 1e6:.2f} MB per sequence")
    assert f"draft LM head     own: {DRAFT_VOCAB} of {VOCAB} tokens, 0.0 MB" in lines
    decided = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith("  ")}
    assert decided["kind"] == "eagle3 (tensor)"
    assert decided["source_format"] == "eagle3-official (tensor)"
    assert decided["boundaries"] == "2, 4, 5 (default: {2, N//2, N-3} of the target's N layers)"
    assert decided["own_lm_head"] == "True (tensor)"
    assert decided["token_ids"] == "40 (tensor: row + d2t: 40 of 64 tokens)"
    assert decided["rope_theta"] == "10000.0 (config)"
    expected = {"feature_norm", "residual", "output_norm", "feedback", "rms_norm_eps", "fc_bias", "own_embedding"}
    assert expected <= set(decided)
    (memory,) = [line for line in lines if line.startswith("memory")]
    assert "draft head 0 MB, KV cache 0.1 MB per sequence with 0.0 MB for the draft head (0 MB for 2)" in memory


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ((), "draft LM head     target: 64 of 64 tokens, no weights of its own"),
        (("--draft-vocab", 10), "draft LM head     reduced: 10 of 64 tokens, 0.0 MB"),
        (("--draft-lm-head", "target"), "draft LM head     target: 64 of 64 tokens, no weights of its own"),
        (("--draft-lm-head", "int4"), "draft LM head     int4: 64 of 64 tokens, 0.0 MB"),
        (("--draft-vocab", 10, "--draft-lm-head", "int4"), "draft LM head     int4: 10 of 64 tokens, 0.0 MB"),
    ],
)
def test_dry_run_names_the_draft_lm_head(builder: Builder, args: tuple[object, ...], line: str) -> None:
    make_e1(builder.head)
    result = builder.build("--eagle", builder.head, "--dry-run", *args)
    assert_done(result)
    assert line in result.out.splitlines()
    assert "  token_ids               all (tensor: no token_map: rows are token ids)" in result.out.splitlines()


def test_warnings_are_shown(builder: Builder) -> None:
    make_e1(builder.head, poison=True)
    planned = builder.build("--eagle", builder.head, "--dry-run")
    assert any(line.startswith("warning") and "input_layernorm" in line for line in planned.out.splitlines())
    assert "input_layernorm" in builder.build("--eagle", builder.head).err


def test_without_a_head(builder: Builder) -> None:
    assert_done(builder.build("--no-eagle"))
    assert EngineDir.load(builder.output).draft_head is None


def test_missing_head(builder: Builder) -> None:
    builder.refused(f"draft head {builder.head}: {builder.head} does not exist; expected a draft head's directory")


def test_empty_head(builder: Builder) -> None:
    assert_refused(builder.build("--eagle", ""), "--eagle is empty; give a draft head's directory or a hub id")


def test_head_without_config(builder: Builder) -> None:
    make_e1(builder.head)
    (builder.head / "config.json").unlink()
    builder.refused("has no config.json; expected a draft head's directory")


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_truncated_head(builder: Builder, size: int) -> None:
    make_e1(builder.head, safetensors=True)
    os.truncate(builder.head / "model.safetensors", size)
    builder.refused("draft head", "model.safetensors is truncated", "fetch it again")


def test_head_that_lacks_a_weight(builder: Builder) -> None:
    make_e3(builder.head, changes={"layers.0.mlp.up_proj.weight": None})
    builder.refused(f"draft head {builder.head}: the draft head has no tensor", "up_proj")


def test_head_of_another_target(builder: Builder) -> None:
    make_e3(builder.head, target_hidden=48, with_embedding=True)
    builder.refused(f"draft head {builder.head}:", "hidden")
    make_e3(builder.head, without=("vocab_size",), changes={"t2d": torch.zeros(VOCAB + 1, dtype=torch.bool)})
    builder.refused(f"draft head {builder.head}: t2d is for a vocabulary of 65 tokens, the target has 64")


def test_target_in_place_of_a_head(builder: Builder, target: Path) -> None:
    builder.head = target
    builder.refused(f"draft head {target}:", "head")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--no-eagle",), "--eagle and --no-eagle exclude each other"),
        (("--eagle-option", "rope_theta"), "expected KEY=VALUE"),
        (("--eagle-option", "nonsense=1"), "EAGLE option 'nonsense' is unknown"),
        (("--eagle-option", "input_norm=true"), "EAGLE option input_norm is for eagle heads"),
        (("--draft-lm-head", "int8"), "'int8' is not one of 'target', 'int4'"),
        (("--draft-vocab", "0"), "--draft-vocab 0: a draft vocabulary needs at least 1 token"),
        (("--draft-vocab", "-5"), "--draft-vocab -5: a draft vocabulary needs at least 1 token"),
        (("--draft-vocab", ""), "--draft-vocab is ''; expected a size N, a file of token ids, or N:FILE"),
        (("--draft-vocab", "missing.json"), "there is no file missing.json"),
        (("--draft-vocab", "5:missing.txt"), "there is no file missing.txt"),
    ],
)
def test_options_that_are_refused(builder: Builder, args: tuple[object, ...], words: str) -> None:
    make_e3(builder.head)
    builder.refused(words, args=args)


@pytest.mark.parametrize(
    "args", [("--eagle-option", "rope_theta=1"), ("--draft-vocab", 5), ("--draft-lm-head", "target")], ids=str
)
def test_options_without_a_head(builder: Builder, args: tuple[object, ...]) -> None:
    assert_refused(builder.build(*args), f"{args[0]} is for a draft head, and none is built in; add --eagle HEAD")
    assert names(builder.place) == []


def test_output_that_is_the_head(builder: Builder) -> None:
    make_e1(builder.head)
    builder.output = builder.head
    builder.refused("is or holds the draft head", args=("--force",))


def test_failure_with_force_keeps_the_old_one(builder: Builder) -> None:
    make_e1(builder.head)
    assert_done(builder.build("--eagle", builder.head))
    before = EngineDir.load(builder.output)
    os.truncate(builder.head / "pytorch_model.bin", 1000)
    builder.refused("pytorch_model.bin is damaged", args=("--force",))
    assert EngineDir.load(builder.output) == before
    before.verify(whole=True)
