"""`trtspec tune`: what it prints and writes, and that the other commands use it."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from invocation import Invoke, Result, assert_done, assert_refused, names

from trtspec.bench import tune_measure
from trtspec.bench.tune_measure import SessionMeasure
from trtspec.bench.tune_race import Measured
from trtspec.config import SpeculationConfig
from trtspec.engine_defaults import DefaultsOrigin, TunedDefaults
from trtspec.engine_dir import EngineDir
from trtspec.session import Session

COPY = "red green blue red green blue red green"
ORIGIN = DefaultsOrigin("chat", 16, 1, 128, 1.25, "some machine", "2026-11-30T12:00:00+00:00", "0.1.0")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Four prompts that lookup drafts for."""
    file = tmp_path / "set.jsonl"
    rows = [{"id": f"p{n}", "prompt": f"{COPY} {n} " * (n + 1)} for n in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def fast_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured speeds in which plain decoding is twice as fast; tokens are generated and checked all the same."""
    honest = SessionMeasure.__call__

    def measure(self: SessionMeasure, settings: SpeculationConfig, group: int) -> Measured:
        tokens = honest(self, settings, group).tokens
        return Measured(tokens, tokens / (80.0 if settings.method == "none" else 40.0))

    monkeypatch.setattr(SessionMeasure, "__call__", measure)


def tune(trtspec: Invoke, directory: Path, dataset: object, *args: object) -> Result:
    return trtspec("tune", directory, "--dataset", dataset, "--max-new-tokens", 12, *args)


def store(directory: Path, **settings: Any) -> None:
    """Defaults as an earlier run would have left them."""
    defaults = TunedDefaults(SpeculationConfig(**{"method": "ngram", **settings}), ORIGIN)
    EngineDir.load(directory).store_defaults(defaults)


def test_end_to_end(trtspec: Invoke, engine_copy: Path, dataset: Path, tmp_path: Path) -> None:
    """Whatever is the fastest here: the table, the report and engine.json tell the same."""
    report = tmp_path / "tune.json"
    before = {file: file.read_bytes() for file in engine_copy.rglob("*") if file.is_file()}
    result = tune(trtspec, engine_copy, dataset, "--minutes", 0.5, "--json", report)
    assert_done(result)
    lines = result.out.splitlines()
    assert lines[0].split() == ["settings", "step", "tokens/s", "by", "the", "start", "spread", "prompts", "verdict"]
    assert lines[1].split()[:3] == ["ngram", "start", "-"]
    assert lines[2].split()[:2] == ["none", "method"]
    assert "lossless: all settings gave the tokens of none on all prompts that they saw" in lines
    data = json.loads(report.read_text(encoding="utf-8"))
    assert data["start"]["method"] == "ngram"
    assert [row["label"] for row in data["tried"]] == [
        line.split("  ")[0].strip() for line in lines[2 : 2 + len(data["tried"])]
    ]
    assert data["settings"]["dataset"] == str(dataset)
    assert (data["settings"]["prompts"], data["settings"]["batch_size"]) == (4, 1)
    defaults = EngineDir.load(engine_copy).defaults
    assert data["written"] == data["confirmed"] == (defaults is not None)
    if defaults is None:
        assert "the defaults are left as they were" in lines[-1]
        assert (engine_copy / "engine.json").read_bytes() == before[engine_copy / "engine.json"]
    else:
        assert lines[-1].endswith(f"{engine_copy / 'engine.json'} has it as its default")
        assert defaults.to_json() == data["defaults"]
    assert {file: file.read_bytes() for file in before if file.name != "engine.json"} == {
        file: content for file, content in before.items() if file.name != "engine.json"
    }
    EngineDir.load(engine_copy).verify(whole=True)


@pytest.mark.usefixtures("fast_without_drafts")
def test_the_winner_becomes_the_default(trtspec: Invoke, engine_copy: Path, dataset: Path) -> None:
    result = tune(trtspec, engine_copy, dataset, "--batch-size", 2, "--limit", 5)
    assert_refused(result, "4 prompts in batches of 2 make 2 groups", "give more prompts, or a smaller --batch-size")
    result = tune(trtspec, engine_copy, dataset)
    assert_done(result)
    *_, confirmation, lossless, last = result.out.splitlines()
    assert confirmation.split() == ["none", "confirmation", "80.0", "2.00", "1.98-2.02", "4", "faster,", "confirmed"]
    assert lossless.startswith("lossless")
    told = "none is 2.00 times as fast as ngram (1.98 to 2.02);"
    assert last == f"{told} {engine_copy / 'engine.json'} has it as its default"
    defaults = EngineDir.load(engine_copy).defaults
    assert defaults is not None
    assert defaults.speculation == SpeculationConfig(method="none")
    origin = defaults.origin
    assert (origin.dataset, origin.prompts, origin.batch_size, origin.max_new_tokens) == (str(dataset), 4, 1, 12)
    assert (origin.gain, origin.machine.split(",")[0]) == (2.0, "onnxruntime")
    again = tune(trtspec, engine_copy, dataset)
    assert_done(again)
    assert again.out.splitlines()[1].split()[:2] == ["none", "start"]
    assert "nothing tried was faster than the current settings by more than the noise of" in again.out
    assert EngineDir.load(engine_copy).defaults == defaults


@pytest.mark.usefixtures("fast_without_drafts")
def test_dry_run_writes_nothing(trtspec: Invoke, engine_copy: Path, dataset: Path, tmp_path: Path) -> None:
    before, report = (engine_copy / "engine.json").read_bytes(), tmp_path / "tune.json"
    result = tune(trtspec, engine_copy, dataset, "--dry-run", "--json", report)
    assert_done(result)
    assert result.out.endswith("is left as it was (--dry-run)\n")
    assert (engine_copy / "engine.json").read_bytes() == before
    data = json.loads(report.read_text(encoding="utf-8"))
    assert (data["confirmed"], data["written"]) == (True, False)
    assert data["defaults"]["speculation"] == {"method": "none"}


@pytest.mark.usefixtures("fast_without_drafts")
def test_too_little_time(trtspec: Invoke, engine_copy: Path, dataset: Path) -> None:
    result = tune(trtspec, engine_copy, dataset, "--minutes", 1e-6)
    assert_done(result)
    assert "the search ended before all steps were gone through: --minutes 1e-06 was over" in result.out
    assert result.out.endswith("give more --minutes, or shorter answers with --max-new-tokens\n")
    assert EngineDir.load(engine_copy).defaults is None


def test_other_tokens_are_an_error(
    trtspec: Invoke, engine_copy: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method ngram lies about one token of its second full run."""
    honest, runs = Session.generate, count()

    def generate(self: Session, prompts: Any, sampling: Any, speculation: Any) -> Any:
        completions = honest(self, prompts, sampling, speculation)
        if speculation.method == "ngram" and sampling.max_new_tokens == 20 and next(runs) == 1:
            completions[0].token_ids[7] = (completions[0].token_ids[7] + 1) % 49152
        return completions

    monkeypatch.setattr(Session, "generate", generate)
    monkeypatch.setattr(tune_measure, "WARM_UP_TOKENS", 4)
    before = (engine_copy / "engine.json").read_bytes()
    result = tune(trtspec, engine_copy, dataset, "--max-new-tokens", 20)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ngram gave other tokens than none: prompt p2, token 7, ")
    assert "(logit gap " in result.err
    assert (engine_copy / "engine.json").read_bytes() == before


def test_reset(trtspec: Invoke, engine_copy: Path, dataset: Path) -> None:
    before = (engine_copy / "engine.json").read_bytes()
    store(engine_copy, ngram_tokens=3)
    result = trtspec("tune", engine_copy, "--reset")
    assert_done(result)
    assert result.out == f"{engine_copy / 'engine.json'} has no tuned defaults any more\n"
    assert (engine_copy / "engine.json").read_bytes() == before
    assert_done(trtspec("tune", engine_copy, "--reset"))
    assert_refused(tune(trtspec, engine_copy, dataset, "--reset"), "leave --dataset out, or --reset")


def test_inspect_shows_them(trtspec: Invoke, engine_copy: Path) -> None:
    assert trtspec("inspect", engine_copy, "--json").lines[0]["defaults"] is None
    assert "\ndefaults: none\n" in trtspec("inspect", engine_copy).out
    store(engine_copy, ngram_tokens=3)
    defaults = trtspec("inspect", engine_copy, "--json").lines[0]["defaults"]
    assert defaults["speculation"] == {"method": "ngram", "ngram_tokens": 3}
    assert defaults["origin"]["gain"] == 1.25
    text = trtspec("inspect", engine_copy).out
    assert "\ndefaults:\n  speculation:\n    method: ngram\n    ngram_tokens: 3\n  origin:\n    dataset: chat\n" in text


def test_run_uses_them_where_no_option_is_given(trtspec: Invoke, engine_copy: Path) -> None:
    options = ("run", engine_copy, "--prompt", COPY * 2, "--max-new-tokens", 60, "--json")

    def metrics(*more: object) -> Any:
        (line,) = trtspec(*options, *more).lines
        found = line["metrics"]
        return line["token_ids"], found["steps"], found["draft_tokens"]

    plain, one = metrics(), metrics("--ngram-tokens", 1)
    assert plain != one
    store(engine_copy, ngram_tokens=1)
    assert metrics() == metrics("--method", "ngram") == one
    # What is given wins, even where it is the ordinary default.
    assert metrics("--ngram-tokens", SpeculationConfig().ngram_tokens) == plain
    assert metrics("--method", "none")[2] == 0
    store(engine_copy, method="none", ngram_tokens=1)
    assert metrics()[2] == 0
    assert metrics("--method", "ngram") == one


def test_bench_uses_them_where_no_option_is_given(trtspec: Invoke, engine_copy: Path, dataset: Path) -> None:
    report = engine_copy.parent / "report.json"

    def tokens(*more: object) -> tuple[int, int]:
        options = ("--methods", "ngram", "--dataset", dataset, "--max-new-tokens", 30, "--json", report, *more)
        assert_done(trtspec("bench", engine_copy, *options))
        data = json.loads(report.read_text(encoding="utf-8"))
        return data["settings"]["ngram_tokens"], data["methods"][0]["metrics"]["draft_tokens"]

    plain, one = tokens(), tokens("--ngram-tokens", 1)
    assert plain != one
    store(engine_copy, ngram_tokens=1)
    assert tokens() == one
    assert tokens("--ngram-tokens", 10) == plain


def test_an_option_that_does_not_fit_the_tuned_ones(trtspec: Invoke, engine_copy: Path) -> None:
    store(engine_copy, ngram_min=4)
    result = trtspec("run", engine_copy, "--prompt", COPY, "--ngram-max", 3)
    assert_refused(result, "ngram_max 3 is less than ngram_min 4", f"are those that {engine_copy} was tuned to")
    assert_done(trtspec("run", engine_copy, "--prompt", COPY, "--ngram-max", 3, "--ngram-min", 1))


def test_help_shows_the_ordinary_defaults(trtspec: Invoke, engine_copy: Path) -> None:
    store(engine_copy, ngram_tokens=3)
    assert "[default: 10]" in trtspec("run", "--help").out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--limit", 2), "2 prompts in batches of 1 make 2 groups"),
        (("--batch-size", 9), "decodes 8 prompts at once; give at most that"),
        (("--minutes", 0), "--minutes"),
        (("--max-new-tokens", 0), "max_new_tokens is 0"),
        (("--max-new-tokens", 512), "with --max-new-tokens 512 it exceeds the directory's 512"),
        (("--runtime", "tensorrt"), "was built for onnxruntime, not for tensorrt"),
        (("--json", "missing/report.json"), "there is no directory"),
    ],
)
def test_refused_options(
    trtspec: Invoke, engine_copy: Path, dataset: Path, options: tuple[object, ...], words: str
) -> None:
    before = names(engine_copy)
    assert_refused(tune(trtspec, engine_copy, dataset, *options), words)
    assert names(engine_copy) == before


def test_dataset_is_needed(trtspec: Invoke, engine_copy: Path, tmp_path: Path) -> None:
    assert_refused(trtspec("tune", engine_copy), "Missing option '--dataset'")
    assert_refused(tune(trtspec, engine_copy, "no-such-set"), "no-such-set: no such file, and no built-in set")
    assert_refused(tune(trtspec, tmp_path / "missing", "chat"), "there is no engine directory")
