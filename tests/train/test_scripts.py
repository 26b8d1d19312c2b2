"""The training scripts as commands."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
import torch

import trtspec
from trtspec.checkpoint.draft_head import open_draft_head
from trtspec.checkpoint.target import TargetConfig
from trtspec.train.store import TrainingData, shard_files

SCRIPTS = Path(__file__).parents[2] / "build_scripts"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / script, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def load(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script, SCRIPTS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_collect_and_train(tiny_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"question {n}"} for n in range(140)]
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    collected = run(
        "train_eagle.py", "collect", tiny_dir, "--output", tmp_path / "data", "--prompt-file", prompts,
        "--max-new-tokens", 8,
    )  # fmt: skip
    assert (collected.returncode, collected.stdout) == (0, ""), collected.stderr
    training = ("--data", tmp_path / "data", "--run", tmp_path / "run", "--epochs", 1, "--loss-vocab", 64)
    trained = run("train_eagle.py", "train", tiny_dir, *training, "--output", tmp_path / "head")
    assert trained.returncode == 0, trained.stderr
    assert "held-out acceptance by position" in trained.stdout
    target = TargetConfig.from_json(trtspec.EngineDir.load(tiny_dir).target.config)
    head = open_draft_head(tmp_path / "head", target)
    assert (head.config.kind, head.warnings) == ("eagle", ())
    assert head.ranking
    more = ("--start-from", tmp_path / "head", "--copy-groups", 1, "--rope-theta", 1e6, "--learning-rate-scale", 0.3)
    further = run(
        "train_eagle.py", "train", tiny_dir, "--data", tmp_path / "data", "--run", tmp_path / "more", "--epochs", 1,
        "--loss-vocab", 64, "--read-prompts", 1, "--held-out", 8, "--blend", 0.5, *more,
        "--output", tmp_path / "further",
    )  # fmt: skip
    assert further.returncode == 0, further.stderr
    wider = open_draft_head(tmp_path / "further", target).config
    assert (wider.num_kv_heads, wider.rope.theta) == (head.config.num_kv_heads + 1, 1e6)
    again = run("train_eagle.py", "train", tiny_dir, *training, "--output", tmp_path / "head")
    assert again.returncode == 2
    assert again.stderr.startswith("error: --output")


def test_misuse_is_one_line(tiny_dir: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("collect", tiny_dir, "--output", tmp_path / "data"), "give one of --generated-prompts"),
        (
            ("train", tiny_dir, "--data", tmp_path, "--run", tmp_path / "r", "--output", tmp_path / "h"),
            "no training data",
        ),
        (
            ("train", tiny_dir, "--data", tmp_path, "--run", tmp_path / "r", "--output", tmp_path / "h", "--epochs", 0),
            "--epochs",
        ),
        (
            ("train", tmp_path, "--data", tmp_path, "--run", tmp_path / "r", "--output", tmp_path / "h"),
            "engine directory",
        ),
    ):
        result = run("train_eagle.py", *arguments)
        assert result.returncode == 2
        assert result.stderr.startswith("error: ")
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_bulk_answers_are_the_targets(tiny_dir: Path, tmp_path: Path) -> None:
    """In bfloat16, so tokens may differ where two are nearly equal, but only there."""
    bulk = load("bulk_answers")
    target = bulk.PlainTarget(trtspec.EngineDir.load(tiny_dir), torch.device("cpu"), 256)
    with trtspec.Session.open(tiny_dir) as session:
        prompts = [
            session.encode(text) for text in ("one", "two words", "a rather longer prompt about nothing", "x y z")
        ]
        examples = bulk.answer(target, prompts, 12)
        for prompt, example in zip(prompts, examples, strict=True):
            tokens = example.tokens.tolist()
            assert tokens[: len(prompt)] == prompt
            assert example.prompt_length == len(prompt)
            features = session.features(tokens)
            error = (example.hidden.float() - features).norm(dim=1) / features.norm(dim=1)
            assert error.max() < 0.05
            for at in range(len(prompt), len(tokens)):
                logits = session.next_logits(tokens[:at])
                assert logits.max() - logits[tokens[at]] < 0.05 * logits.std()


def test_bulk_answers_are_drawn_by_a_seed(tiny_dir: Path) -> None:
    bulk = load("bulk_answers")
    target = bulk.PlainTarget(trtspec.EngineDir.load(tiny_dir), torch.device("cpu"), 256)
    answers = []
    for seed, temperature in ((1, 1.0), (1, 1.0), (2, 1.0), (2, 1e-4), (0, 0.0)):
        sampling = bulk.Sampling(temperature, torch.Generator().manual_seed(seed))
        examples = bulk.answer(target, [[5, 6, 7], [8, 9]], 12, sampling)
        answers.append([example.tokens.tolist() for example in examples])
    assert answers[0] == answers[1] != answers[2]
    assert answers[2] != answers[3] == answers[4]


def test_bulk_answers_are_read_as_articles(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bulk = load("bulk_answers")
    monkeypatch.setattr(bulk, "SHORTEST_ARTICLE", 4)
    base = [str(tiny_dir), "--max-new-tokens", "8", "--max-prompt", "500"]
    written = ["--mix", "report", "--generated-prompts", "3", "--temperature", "1", "--output", str(tmp_path / "a")]
    bulk.main(base + written, standalone_mode=False)
    bulk.main([*base, "--articles", str(tmp_path / "a"), "--output", str(tmp_path / "b")], standalone_mode=False)
    articles, readings = (TrainingData(shard_files(tmp_path / name)).examples for name in "ab")
    assert len(readings) == sum(len(e.tokens) - e.prompt_length >= 4 for e in articles)
    with pytest.raises(click.UsageError, match="give one of"):
        bulk.main([str(tiny_dir), "--output", str(tmp_path / "c")], standalone_mode=False)


def test_bulk_answers_writes_a_shard_per_batch_and_goes_on(tiny_dir: Path, tmp_path: Path) -> None:
    bulk = load("bulk_answers")
    options = [str(tiny_dir), "--output", str(tmp_path), "--generated-prompts", "6", "--batch-size", "4"]
    options += ["--max-new-tokens", "3", "--max-prompt", "400"]
    bulk.main(options, standalone_mode=False)
    first, second = shard_files(tmp_path)
    written = first.read_bytes()
    second.unlink()
    bulk.main(options, standalone_mode=False)
    assert first.read_bytes() == written
    assert len(TrainingData(shard_files(tmp_path))) == 6
