"""`trtspec bench`: figures of every method, and a method that changes tokens is found out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from invocation import Invoke, assert_done, assert_refused

from trtspec.bench.runner import Output, SessionMethod
from trtspec.config import SamplingParams

ROW_KEYS = {
    "method",
    "tokens",
    "seconds",
    "tokens_per_second",
    "speedup",
    "step_ms",
    "outside_engines_ms_per_step",
    "outside_engines_share",
    "metrics",
    "spread",
    "acceptance_per_position_by_source",
}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Three prompts that lookup drafts for."""
    file = tmp_path / "set.jsonl"
    text = "red green blue red green blue red green"
    rows = [{"id": "a", "turns": [text]}, {"id": "b", "prompt": text * 2}, {"question_id": 3, "turns": ["x " * 20]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def bench(trtspec: Invoke, directory: Path, dataset: object, *args: object) -> dict[str, Any]:
    """The figures of a successful run."""
    report = directory.parent / "report.json"
    result = trtspec("bench", directory, "--dataset", dataset, "--max-new-tokens", 20, "--json", report, *args)
    assert_done(result)
    data: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    data["stdout"] = result.out
    return data


def lie(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the method ngram change its second prompt's tokens."""
    honest = SessionMethod.complete

    def complete(self: SessionMethod, prompts: Seq[list[int]], sampling: SamplingParams) -> Output:
        output = honest(self, prompts, sampling)
        if self.name != "ngram" or len(prompts) < 2:
            return output
        return dataclasses.replace(output, token_ids=[output.token_ids[0], change(output.token_ids[1])])

    monkeypatch.setattr(SessionMethod, "complete", complete)


def test_report(trtspec: Invoke, tiny_dir: Path, dataset: Path) -> None:
    data = bench(trtspec, tiny_dir, dataset)
    out = data.pop("stdout")
    assert set(data) == {"settings", "prompts", "baseline", "lossless", "methods", "differences"}
    assert (data["prompts"], data["baseline"], data["lossless"], data["differences"]) == (3, "none", True, [])
    assert [row["method"] for row in data["methods"]] == ["none", "ngram"]
    for row in data["methods"]:
        assert set(row) == ROW_KEYS
        assert row["tokens"] == 60
        assert row["seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(60 / row["seconds"])
        assert set(row["metrics"]) >= {"acceptance_length", "by_source", "stage_ms", "match_rate"}
        speeds = row["spread"]["tokens_per_second"]
        assert speeds["min"] == speeds["median"] == speeds["max"] == pytest.approx(row["tokens_per_second"])
        by_source = row["acceptance_per_position_by_source"]
        assert by_source == {"ngram": row["metrics"]["acceptance_per_position"], "eagle": []}
    plain, ngram = (row["metrics"] for row in data["methods"])
    assert (plain["drafts"], plain["acceptance_length"], plain["steps"]) == (0, 1.0, 57)
    assert ngram["drafts"] > 0
    assert data["methods"][0]["speedup"] == 1.0
    expected = {"dataset": str(dataset), "batch_size": 1, "repeats": 1, "max_new_tokens": 20, "dtype": "float32"}
    expected.update(warmup=1, runtime="onnxruntime", temperature=0.0, engine_dir=str(tiny_dir), gpu=None)
    assert data["settings"].items() >= expected.items()
    assert data["settings"].keys() >= {"date", "cpu", "threads", "trtspec_version", "system", "ngram_tokens"}
    table = [line.split() for line in out.splitlines()]
    assert [row[0] for row in table[:3]] == ["method", "none", "ngram"]
    assert "lossless: every method gave the tokens of none on 3 prompts" in out


def test_methods_in_the_order_given(trtspec: Invoke, tiny_dir: Path, dataset: Path) -> None:
    data = bench(trtspec, tiny_dir, dataset, "--methods", "ngram, none", "--limit", 1)
    assert [row["method"] for row in data["methods"]] == ["ngram", "none"]
    assert (data["baseline"], data["prompts"], data["lossless"]) == ("ngram", 1, True)
    assert "lossless: every method gave the tokens of ngram on 1 prompts" in data["stdout"]
    alone = bench(trtspec, tiny_dir, dataset, "--methods", "none", "--limit", 1)
    assert [row["method"] for row in alone["methods"]] == ["none"]


@pytest.mark.parametrize(("batch", "repeats"), [(1, 2), (2, 1), (8, 2)])
def test_batches_and_repeats_count_each_prompt_once(
    trtspec: Invoke, tiny_dir: Path, dataset: Path, batch: int, repeats: int
) -> None:
    data = bench(trtspec, tiny_dir, dataset, "--batch-size", batch, "--repeats", repeats)
    assert [row["tokens"] for row in data["methods"]] == [60, 60]
    assert data["methods"][0]["metrics"]["steps"] == 57
    assert data["lossless"]
    assert (data["settings"]["batch_size"], data["settings"]["repeats"]) == (batch, repeats)


@pytest.mark.parametrize("name", ["edit", "chat", "mixed", "code"])
def test_built_in_sets(trtspec: Invoke, tiny_dir: Path, name: str) -> None:
    result = trtspec("bench", tiny_dir, "--dataset", name, "--limit", 1, "--max-new-tokens", 4)
    if result.code:
        assert_refused(result, "it exceeds the directory's 512: build with a larger --max-seq-len, or use --limit")
    else:
        assert "on 1 prompts" in result.out


def test_spread_over_repeats(trtspec: Invoke, tiny_dir: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SessionMethod.complete
    seconds = {"none": iter([9, 1.0, 2.0, 4.0, 3.0, 3.0, 3.0]), "ngram": iter([9, 0.5, 0.5, 1.0, 1.0, 1.0, 1.5])}

    def complete(self: SessionMethod, prompts: Seq[list[int]], sampling: SamplingParams) -> Output:
        return dataclasses.replace(honest(self, prompts, sampling), seconds=next(seconds[self.name]))

    monkeypatch.setattr(SessionMethod, "complete", complete)
    data = bench(trtspec, tiny_dir, dataset, "--limit", 2, "--repeats", 3)
    plain, ngram = data["methods"]
    # The two groups' medians are 2 and 3 seconds, and 0.5 and 1; the repeats took 4, 5 and 7, and 1.5, 1.5 and 2.5.
    assert (plain["tokens_per_second"], ngram["speedup"]) == (40 / 5, 5 / 1.5)
    assert plain["spread"]["tokens_per_second"] == {"min": 40 / 7, "median": 40 / 5, "max": 40 / 4}
    assert plain["spread"]["speedup"] == {"min": 1, "median": 1, "max": 1}
    assert ngram["spread"]["speedup"] == pytest.approx({"min": 4 / 1.5, "median": 7 / 2.5, "max": 5 / 1.5})
    assert data["stdout"].splitlines()[0].split()[:4] == ["method", "tokens/s", "min", "max"]
    assert data["stdout"].splitlines()[1].split()[:5] == ["none", "8.0", "5.7", "10.0", "1.00"]


@pytest.mark.parametrize(("warmup", "expected"), [(0, []), (1, [1]), (3, [1, 1, 1])])
def test_warm_up_groups_come_before_all(
    trtspec: Invoke, tiny_dir: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch, warmup: int, expected: list[int]
) -> None:
    honest = SessionMethod.complete
    calls: list[tuple[int, int]] = []

    def complete(self: SessionMethod, prompts: Seq[list[int]], sampling: SamplingParams) -> Output:
        calls.append((len(prompts), sampling.max_new_tokens))
        return honest(self, prompts, sampling)

    monkeypatch.setattr(SessionMethod, "complete", complete)
    data = bench(trtspec, tiny_dir, dataset, "--methods", "none", "--limit", 2, "--warmup", warmup)
    assert calls == [*((size, 16) for size in expected), (1, 20), (1, 20)]
    assert data["methods"][0]["tokens"] == 40


def test_a_repeat_with_other_tokens_is_listed(
    trtspec: Invoke, tiny_dir: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SessionMethod.complete
    calls: list[str] = []

    def complete(self: SessionMethod, prompts: Seq[list[int]], sampling: SamplingParams) -> Output:
        output = honest(self, prompts, sampling)
        calls.append(self.name)
        if calls.count("ngram") == 3 and self.name == "ngram":
            return dataclasses.replace(output, token_ids=[output.token_ids[0][:-1]])
        return output

    monkeypatch.setattr(SessionMethod, "complete", complete)
    data = bench(trtspec, tiny_dir, dataset, "--limit", 1, "--warmup", 0, "--repeats", 4)
    assert [(at["method"], at["position"]) for at in data["differences"]] == [("ngram", 19)]


def test_changed_token_is_listed(
    trtspec: Invoke, tiny_dir: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie(monkeypatch, lambda ids: [*ids[:3], (ids[3] + 1) % 49152, *ids[4:]])
    data = bench(trtspec, tiny_dir, dataset, "--batch-size", 2)
    assert data["lossless"] is False
    (difference,) = data["differences"]
    gap = difference.pop("logit_gap")
    expected, found = difference.pop("expected"), difference.pop("found")
    assert difference == {"method": "ngram", "prompt_id": "b", "position": 3}
    assert found == (expected + 1) % 49152
    assert gap > 0, "the target prefers the token it gave"
    line = f"DIFFERENT: ngram on b at token 3: {found} instead of {expected}, logit gap {gap:.2e}"
    assert line in data["stdout"]
    assert "lossless" not in data["stdout"]


def test_missing_token_is_listed(
    trtspec: Invoke, tiny_dir: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie(monkeypatch, lambda ids: ids[:-1])
    data = bench(trtspec, tiny_dir, dataset, "--batch-size", 2)
    (difference,) = data["differences"]
    assert (difference["position"], difference["found"], difference["logit_gap"]) == (19, None, None)
    assert f"DIFFERENT: ngram on b at token 19: None instead of {difference['expected']}\n" in data["stdout"]


def test_hugging_face_beside(trtspec: Invoke, tiny_dir: Path, dataset: Path) -> None:
    data = bench(trtspec, tiny_dir, dataset, "--compare", "hf", "--ngram-tokens", 6)
    assert [row["method"] for row in data["methods"]] == ["none", "ngram", "hf", "hf-lookup-6"]
    assert data["lossless"], data["differences"]
    for row in data["methods"][2:]:
        assert (row["tokens"], row["metrics"], row["step_ms"]) == (60, None, None)
        assert row["tokens_per_second"] > 0
    assert "lossless: every method gave the tokens of none" in data["stdout"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--methods", "none,telepathy"), "method 'telepathy' is unknown; choose one of: none, ngram"),
        (("--methods", ""), "give each method once, separated by commas"),
        (("--methods", "none,none"), "give each method once, separated by commas"),
        (("--limit", 0), "--limit"),
        (("--repeats", 0), "--repeats"),
        (("--batch-size", 0), "--batch-size"),
        (("--batch-size", "1,x"), "'1,x': give different integers of at least 1, separated by commas"),
        (("--batch-size", "2,2"), "'2,2': give different integers"),
        (("--sweep-tokens", ""), "'': give different integers"),
        (("--sweep-tokens", "3,33"), "ngram@33: the engine directory verifies 32 draft tokens at most"),
        (("--sweep-tokens", "3,999"), "ngram@999: the engine directory verifies 32 draft tokens at most"),
        (("--batch-size", "1,9"), "sequences at once; build it with --max-batch-size 9"),
        (("--sweep-tokens", "3", "--methods", "none"), "--sweep-tokens: none of none has a draft length to vary"),
        (("--warmup", -1), "--warmup"),
        (("--dataset", "edit", "--dataset", "edit"), "--dataset: give each one once"),
        (("--max-new-tokens", 0), "max_new_tokens is 0"),
        (("--ngram-min", 4, "--ngram-max", 3), "ngram_max 3 is less than ngram_min 4"),
        (("--compare", "vllm"), "'vllm' is not 'hf'"),
        (("--runtime", "tensorrt"), "was built for onnxruntime, not for tensorrt"),
        (("--max-new-tokens", 512), "with --max-new-tokens 512 it exceeds the directory's 512"),
    ],
)
def test_bad_options(trtspec: Invoke, tiny_dir: Path, dataset: Path, options: tuple[object, ...], words: str) -> None:
    assert_refused(trtspec("bench", tiny_dir, "--dataset", dataset, *options), words)


def test_unknown_dataset(trtspec: Invoke, tiny_dir: Path) -> None:
    result = trtspec("bench", tiny_dir, "--dataset", "no-such-set")
    assert_refused(result, "no-such-set: no such file, and no built-in set; built in are: edit, chat")


def test_bad_line_of_a_dataset(trtspec: Invoke, tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text('{"prompt": "fine"}\n{"text": "Hi"}\n')
    result = trtspec("bench", tiny_dir, "--dataset", tmp_path / "set.jsonl")
    assert_refused(result, f"{tmp_path / 'set.jsonl'}:2: found the keys text")


def test_report_that_cannot_be_written(trtspec: Invoke, tiny_dir: Path, dataset: Path, tmp_path: Path) -> None:
    options = ("bench", tiny_dir, "--dataset", dataset, "--json")
    missing = tmp_path / "missing" / "report.json"
    assert_refused(trtspec(*options, missing), f"--json {missing}: there is no directory {missing.parent}")
    assert not missing.parent.exists()
    assert_refused(trtspec(*options, tmp_path), f"--json {tmp_path} is a directory; give the name of a file")


def test_missing_directory(trtspec: Invoke, dataset: Path, tmp_path: Path) -> None:
    assert_refused(trtspec("bench", tmp_path / "missing", "--dataset", dataset), "there is no engine directory")
