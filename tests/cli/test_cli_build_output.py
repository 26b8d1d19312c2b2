"""Where `trtspec build` writes: what is never overwritten, and full disks."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from invocation import Builder, Invoke, assert_done, assert_refused, names

from trtspec import runtime_build
from trtspec.checkpoint import writer
from trtspec.engine_dir import EngineDir

Usage = namedtuple("Usage", ["total", "used", "free"])


def test_output_that_is_not_empty(builder: Builder) -> None:
    builder.output.mkdir()
    (builder.output / "mine").write_text("mine")
    assert_refused(builder.build(), f"--output {builder.output} exists and is not empty", "--force")
    assert names(builder.output) == ["mine"]
    assert_done(builder.build("--force"))
    assert "engine.json" in names(builder.output)
    assert "mine" not in names(builder.output)
    assert names(builder.hf.parent) == ["hf", "out"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "MODEL.BIN", ".git", "sub/x.GGUF"])
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_model_is_never_replaced(builder: Builder, name: str, force: tuple[str, ...]) -> None:
    (builder.output / name).parent.mkdir(parents=True)
    (builder.output / name).write_text("precious")
    assert_refused(builder.build(*force), f"is no engine directory and holds {name}, which --force does not delete")
    assert (builder.output / name).read_text() == "precious"


def test_what_force_would_delete_is_said(builder: Builder) -> None:
    builder.output.mkdir()
    (builder.output / "notes.txt").write_text("old")
    assert_refused(builder.build(), "is no engine directory", "--force would delete what is in it: notes.txt)")
    assert_done(builder.build("--force"))
    assert_refused(builder.build(), "out exists and is not empty; choose another directory or add --force")


def test_failure_with_force_keeps_the_old_one(builder: Builder) -> None:
    assert_done(builder.build())
    before = EngineDir.load(builder.output)
    (builder.hf / "tokenizer.json").unlink()
    assert_refused(builder.build("--force", "--dtype", "float16"), "tokenizer")
    assert EngineDir.load(builder.output) == before
    before.verify()


def test_output_that_is_a_file(builder: Builder) -> None:
    builder.output.write_text("mine")
    assert_refused(builder.build("--force"), "is a file; choose a directory")
    assert builder.output.read_text() == "mine"


def test_output_below_a_file(trtspec: Invoke, hf_copy: Path) -> None:
    result = trtspec("build", hf_copy, "--output", hf_copy / "config.json" / "out")
    assert_refused(result, "cannot be made", "choose another directory")


def test_output_that_is_the_current_directory(
    trtspec: Invoke, tiny_hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(trtspec("build", tiny_hf_dir, "--output", ".", "--force"), "the current or the home directory")


def test_too_little_disk(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 1000, 1000))
    builder.refused("MB free and the build needs about 6 MB; free some", args=("--dtype", "float16"))


def full(*args: object, **options: object) -> None:
    """A disk without room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_disk_full_in_the_weights(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_write", full)
    builder.refused(
        f"no space left on the disk of {builder.output}; free some or choose another --output",
        args=("--dtype", "float16"),
    )


def test_disk_full_in_the_graphs(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_build.ir, "save", full)
    builder.refused(f"no space left on the disk of {builder.output}; free some or choose another --output")


def test_disk_full_in_the_tokenizer(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedTokenizerFast

    def full_in_rust(*args: object, **options: object) -> None:
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full_in_rust)
    builder.refused("the tokenizer cannot be written", "No space left on device")


def test_force_never_replaces_the_target(trtspec: Invoke, tiny_hf_dir: Path, tmp_path: Path) -> None:
    parent = tmp_path / "models"
    shutil.copytree(tiny_hf_dir, parent / "tiny")
    before = names(parent)
    link = tmp_path / "link"
    link.symlink_to(parent / "tiny")
    for output in (parent / "tiny", parent, link):
        assert_refused(trtspec("build", parent / "tiny", "--output", output, "--force"), "is or holds the target")
    assert names(parent) == before


def test_an_empty_path_is_not_the_current_directory(trtspec: Invoke, tiny_hf_dir: Path, tmp_path: Path) -> None:
    assert_refused(trtspec("build", tiny_hf_dir, "--output", ""), "is empty")
    assert_refused(trtspec("build", "", "--output", tmp_path / "out"), "the target is empty")
    assert_refused(trtspec("run", "", "--prompt", "hi"), "is empty")
