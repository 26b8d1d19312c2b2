"""`trtspec demo`: the main job on a fresh machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from invocation import Invoke, assert_done, assert_refused, names

from trtspec import config
from trtspec import engine_build as trtspec_build
from trtspec.cli import demo as module
from trtspec.config import SamplingParams
from trtspec.engine_dir import EngineDir

METHODS = ["none", "ngram"]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made; also the current directory."""
    path = tmp_path / "scratch"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.chdir(path)
    return path


@pytest.fixture
def tiny_demo(tiny_hf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiny model be the demo target: a minute less."""
    build = trtspec_build.build

    def build_tiny(target: str, output: Path, **options: object) -> EngineDir:
        assert (target, options.pop("max_seq_len")) == ("demo", 2048)
        assert (options.pop("draft_vocab"), options.pop("draft_lm_head")) == (8192, "int4")
        return build(tiny_hf_dir, output, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(trtspec_build, "build", build_tiny)
    monkeypatch.setattr(module, "EDIT", "one two three one two three one two")


@pytest.mark.slow
def test_demo_json(trtspec: Invoke, scratch: Path, demo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's own engines, built once for all tests, and fewer tokens."""

    def place(target: str, output: Path, **options: object) -> None:
        assert (target, options.pop("max_seq_len")) == ("demo", 2048)
        shutil.copytree(demo_dir, output, copy_function=os.link)

    monkeypatch.setattr(trtspec_build, "build", place)
    monkeypatch.setattr(module, "SamplingParams", lambda max_new_tokens: SamplingParams(min(max_new_tokens, 48)))
    result = trtspec("demo", "--json")
    assert_done(result)
    (found,) = result.lines
    assert set(found) == {"edit", "chat"}
    for name in ("edit", "chat"):
        assert [row["method"] for row in found[name]["methods"]] == list(config.METHODS)
        assert (found[name]["baseline"], found[name]["lossless"], found[name]["differences"]) == ("none", True, [])
    lengths = {row["method"]: row["metrics"]["acceptance_length"] for row in found["edit"]["methods"]}
    assert lengths["none"] == 1.0
    assert lengths["ngram"] > 2, "the edit copies most of its prompt"
    assert lengths["eagle"] > 1.2
    assert names(scratch) == []


def test_table(trtspec: Invoke, scratch: Path, tiny_demo: None) -> None:
    result = trtspec("demo")
    assert_done(result)
    lines = result.out.splitlines()
    assert lines[0].split("  ")[0] == "prompt"
    assert all(word in lines[0] for word in ("method", "tokens/s", "speed-up", "acceptance length"))
    assert [line.split()[:2] for line in lines[1:5]] == [[name, m] for name in ("edit", "chat") for m in METHODS]
    assert lines[5:] == ["all methods gave the same tokens"]
    assert names(scratch) == []


@pytest.mark.parametrize(("options", "place"), [((("--keep"),), "trtspec-demo"), (("--output", "here"), "here")])
def test_directory_is_kept(
    trtspec: Invoke, scratch: Path, tiny_demo: None, options: tuple[str, ...], place: str
) -> None:
    result = trtspec("demo", *options)
    assert_done(result)
    assert f"engine directory: {place} " in result.out
    assert names(scratch) == [place]
    assert EngineDir.load(place).target.name == "tiny-llama"
    assert_refused(trtspec("demo", *options), f"--output {place} exists and is not empty")


def test_failure_leaves_nothing(
    trtspec: Invoke, scratch: Path, tiny_demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_compare", interrupt)
    assert trtspec("demo").code == 130
    assert names(scratch) == []


def test_differences_are_a_failure(
    trtspec: Invoke, scratch: Path, tiny_demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtspec.bench.runner import SessionMethod

    honest = SessionMethod.complete

    def complete(self, prompts, sampling):  # type: ignore[no-untyped-def]
        output = honest(self, prompts, sampling)
        if self.name == "ngram":
            output.token_ids[0][5] += 1
        return output

    monkeypatch.setattr(SessionMethod, "complete", complete)
    result = trtspec("demo")
    assert result.code == 1
    assert "edit: ngram differs from none at token 5" in result.out
    assert "error: the methods gave different tokens" in result.err
    assert result.err.count("\n") == 1
