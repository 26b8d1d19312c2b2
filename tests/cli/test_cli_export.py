"""`trtspec export tensorrt-llm`: the file it writes, what it says on stderr, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoint.heads import make_e1, make_e3
from click.testing import CliRunner
from head_targets import SMALL, save_head_target
from invocation import Invoke, Result, assert_done, assert_refused, names

import trtspec as package
from trtspec.checkpoint.demo import packaged_head
from trtspec.checkpoint.draft_head.config import EAGLE
from trtspec.checkpoint.draft_head.format import identify
from trtspec.checkpoint.shards import open_tensors, read_json
from trtspec.cli.main import cli
from trtspec.config import SpeculationConfig
from trtspec.engine_defaults import DefaultsOrigin, TunedDefaults
from trtspec.engine_dir import EngineDir


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target") / "target"
    save_head_target(directory)
    return directory


@pytest.fixture(scope="module")
def engines(target: Path) -> Path:
    """An engine directory with an EAGLE-3 head of a reduced vocabulary, which lies beside it."""
    make_e3(target.parent / "head")
    package.build(target, target.parent / "engines", eagle=target.parent / "head", draft_vocab=12, **SMALL)
    return target.parent / "engines"


@pytest.fixture
def head(tmp_path: Path) -> Path:
    make_e3(tmp_path / "head")
    return tmp_path / "head"


class Exporter:
    """Exports into `file`."""

    def __init__(self, trtspec: Invoke, place: Path) -> None:
        self._trtspec, self.file = trtspec, place / "out" / "config.yaml"
        self.file.parent.mkdir()

    def __call__(self, *args: object) -> Result:
        return self._trtspec("export", "tensorrt-llm", *args, "--output", self.file)

    def fields(self, *args: object) -> dict[str, Any]:
        """The speculative part; each line of stderr is in the comments and the other way round."""
        result = self(*args)
        assert result.code == 0, result
        text = self.file.read_text(encoding="utf-8")
        said = [line.removeprefix("no equivalent: ") for line in result.err.splitlines()]
        assert said == [line.removeprefix("# - ") for line in text.splitlines() if line.startswith("# - ")]
        assert result.out.startswith(f"{self.file}: ")
        assert names(self.file.parent) == ["config.yaml"]
        fields: dict[str, Any] = yaml.safe_load(text)["speculative_config"]
        return fields

    def refused(self, *words: str, args: tuple[object, ...]) -> None:
        """The export is refused with these words and leaves nothing."""
        before = names(self.file.parent)
        assert_refused(self(*args), *words)
        assert names(self.file.parent) == before


@pytest.fixture
def export(trtspec: Invoke, tmp_path: Path) -> Exporter:
    return Exporter(trtspec, tmp_path)


def test_lookup_for_a_target(export: Exporter, target: Path) -> None:
    fields = export.fields(target, "--ngram-tokens", 6, "--ngram-max", 3)
    assert (fields["decoding_type"], fields["max_draft_len"], fields["max_matching_ngram_size"]) == ("NGram", 6, 3)


def test_a_hub_id_is_not_fetched_for_a_lookup(export: Exporter) -> None:
    assert export.fields("owner/there-is-no-such-model", "--method", "ngram")["decoding_type"] == "NGram"


def test_plain_decoding(export: Exporter, target: Path) -> None:
    assert_done(export(target, "--method", "none"))
    assert yaml.safe_load(export.file.read_text(encoding="utf-8")) == {"speculative_config": None}


def test_a_target_and_its_head(export: Exporter, target: Path, head: Path) -> None:
    fields = export.fields(target, "--eagle", head)
    assert (fields["decoding_type"], fields["speculative_model"]) == ("Eagle3", str(head))
    assert fields["eagle3_layers_to_capture"] == [1, 3, 4]
    assert fields["sa_config"]["threshold"] == 4


def test_a_head_is_named_as_the_user_did(
    export: Exporter, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(head.parent)
    options = ("--method", "eagle", "--eagle-option", "aux_layers=1,2,8")
    fields = export.fields(target, "--eagle", head.name, *options)
    assert (fields["speculative_model"], fields["eagle3_layers_to_capture"]) == ("head", [0, 1, 7])


def test_an_engine_directory(export: Exporter, engines: Path) -> None:
    fields = export.fields(engines, "--method", "eagle", "--eagle-tokens", 5)
    assert (fields["speculative_model"], fields["max_draft_len"]) == (str(engines.parent / "head"), 5)
    assert "reduced draft vocabulary" in export.file.read_text(encoding="utf-8")


def test_a_tuned_engine_directory(export: Exporter, engines: Path, tmp_path: Path) -> None:
    tuned = EngineDir.load(shutil.copytree(engines, tmp_path / "tuned"))
    origin = DefaultsOrigin("chat", 8, 1, 64, 1.1, "a machine", "2026-01-01T00:00:00Z", "0.1.0")
    tuned.store_defaults(TunedDefaults(SpeculationConfig(method="ngram", ngram_tokens=4, ngram_max=9), origin))
    fields = export.fields(tuned.path)
    assert (fields["decoding_type"], fields["max_draft_len"], fields["max_matching_ngram_size"]) == ("NGram", 4, 9)
    fields = export.fields(tuned.path, "--method", "eagle", "--eagle-tokens", 2, "--force")
    assert (fields["decoding_type"], fields["max_draft_len"]) == ("Eagle3", 2)
    assert export.fields(tuned.path, "--ngram-tokens", 7, "--force")["max_draft_len"] == 7


def test_an_engine_directory_whose_head_is_gone(export: Exporter, engines: Path, head: Path, target: Path) -> None:
    moved = engines.parent / "moved"
    shutil.move(engines.parent / "head", moved)
    try:
        export.refused("no longer there", "--eagle HEAD", args=(engines,))
        assert export.fields(engines, "--method", "ngram")["decoding_type"] == "NGram"
        assert export.fields(engines, "--eagle", head, "--force")["speculative_model"] == str(head)
    finally:
        shutil.move(moved, engines.parent / "head")


def test_the_demo_s_eagle_1_head_is_left_out(export: Exporter) -> None:
    assert export.fields("demo")["decoding_type"] == "NGram"
    text = export.file.read_text(encoding="utf-8")
    assert "the draft head of the demo target is left out" in text
    assert "demo is a GGUF file" in text
    export.refused("EAGLE-1 or 2 head", args=("demo", "--method", "eagle", "--force"))


def test_the_demo_s_head_is_an_eagle_1_head() -> None:
    directory = packaged_head()
    assert identify(read_json(directory / "config.json"), open_tensors(directory).tensors).kind == EAGLE


def test_an_existing_file(export: Exporter, target: Path) -> None:
    export.file.write_text("mine", encoding="utf-8")
    export.refused("exists", "--force", args=(target,))
    assert export.file.read_text(encoding="utf-8") == "mine"
    assert export.fields(target, "--force")["decoding_type"] == "NGram"


def test_a_failed_write_leaves_nothing(export: Exporter, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    export.refused("No space left on device", args=(target,))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("", "--method", "ngram"), "neither an engine directory nor a target"),
        (("nowhere",), "neither an engine directory nor a target"),
        (("{place}",), "neither an engine directory nor a target"),
        (("{target}", "--method", "eagle"), "add --eagle HEAD"),
        (("{target}", "--eagle", ""), "--eagle is empty"),
        (("{target}", "--method", "ngram", "--eagle", "{head}"), "leave --eagle out"),
        (("{target}", "--eagle-option", "rope_theta=1"), "--eagle-option is for --eagle HEAD"),
        (("{target}", "--eagle", "{place}"), "config.json"),
        (("{target}", "--eagle", "{head}", "--eagle-option", "nonsense=1"), "nonsense"),
        (("{target}", "--eagle", "{head}", "--eagle-option", "aux_layers=0,1,2"), "boundary 0"),
        (("{target}", "--eagle", "{old}", "--method", "ngram-eagle"), "EAGLE-1 or 2 head"),
        (("{target}", "--ngram-min", "6"), "ngram_max 5 is less than ngram_min 6"),
    ],
)
def test_refused(export: Exporter, target: Path, head: Path, args: tuple[str, ...], words: str) -> None:
    make_e1(head.parent / "old")
    places = {"place": head.parent, "target": target, "head": head, "old": head.parent / "old"}
    export.refused(words, args=tuple(arg.format(**places) for arg in args))


def test_places_that_cannot_be_written(trtspec: Invoke, target: Path, tmp_path: Path) -> None:
    command = ("export", "tensorrt-llm", target, "--output")
    assert_refused(trtspec(*command, tmp_path), "is a directory")
    assert_refused(trtspec(*command, ""), "is a directory")
    assert_refused(trtspec(*command, tmp_path / "missing" / "file.yaml"), "there is no directory")
    assert names(tmp_path) == []


def test_a_symbolic_link_stays(export: Exporter, target: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text("old", encoding="utf-8")
    export.file.symlink_to(real)
    assert export(target, "--force").code == 0
    assert export.file.is_symlink()
    assert "NGram" in real.read_text(encoding="utf-8")


def test_help_and_usage(trtspec: Invoke) -> None:
    text = " ".join(CliRunner().invoke(cli, ["export", "tensorrt-llm", "--help"], terminal_width=300).output.split())
    for option in ("--output", "--method", "--eagle HEAD", "--eagle-option KEY=VALUE", "--ngram-tokens", "--force"):
        assert option in text
    assert_refused(trtspec("export", "vllm"), "No such command 'vllm'", "(see: trtspec export --help)")
    assert_refused(trtspec("export", "tensorrt-llm", "x"), "Missing option '--output'")
