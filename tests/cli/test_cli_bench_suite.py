"""`trtspec bench` over several prompt sets, batch sizes and draft lengths, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from invocation import Invoke, assert_done, assert_refused, names

TEXT = "red green blue red green blue red green"


@pytest.fixture
def datasets(tmp_path: Path) -> list[Path]:
    """Two sets, of two prompts and of one."""
    files = [tmp_path / "colours.jsonl", tmp_path / "letters.jsonl"]
    for file, texts in zip(files, ([TEXT, TEXT * 2], ["x " * 20]), strict=True):
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return files


def test_several_of_everything_and_the_report(trtspec: Invoke, tiny_dir: Path, datasets: list[Path]) -> None:
    figures, report = datasets[0].parent / "figures.json", datasets[0].parent / "report"
    result = trtspec(
        *("bench", tiny_dir, "--dataset", datasets[0], "--dataset", datasets[1], "--batch-size", "1,2"),
        *("--sweep-tokens", "2,5", "--max-new-tokens", 12, "--json", figures, "--report", report),
    )
    assert_done(result)
    data: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
    assert set(data) == {"settings", "lossless", "runs"}
    assert data["lossless"]
    where = [(run["settings"]["dataset"], run["settings"]["batch_size"], run["prompts"]) for run in data["runs"]]
    assert where == [(str(file), batch, 2 - number) for number, file in enumerate(datasets) for batch in (1, 2)]
    for run in data["runs"]:
        assert set(run) == {"settings", "prompts", "baseline", "lossless", "methods", "differences"}
        assert [row["method"] for row in run["methods"]] == ["none", "ngram", "ngram@2", "ngram@5"]
        assert run["methods"][2]["metrics"]["draft_tokens"] <= 2 * run["methods"][2]["metrics"]["drafts"]
    expected = {"datasets": [*map(str, datasets)], "batch_sizes": [1, 2], "sweep_tokens": [2, 5], "repeats": 1}
    assert data["settings"].items() >= expected.items()
    heads = [line for line in result.out.splitlines() if ", batch " in line]
    assert heads == [f"{file}, batch {batch}" for file in datasets for batch in (1, 2)]
    assert result.out.count("lossless: every method gave the tokens of none") == 4
    plots = {"speedup.png", "acceptance.png", "stages.png", "draft-length.png", "batch.png"}
    assert set(names(report)) == {"index.html", "bench.json", *plots}
    assert json.loads((report / "bench.json").read_text(encoding="utf-8")) == data
    page = (report / "index.html").read_text(encoding="utf-8")
    for run in data["runs"]:
        for row in run["methods"]:
            assert f'data-value="{row["tokens_per_second"]}"' in page


def test_report_of_a_single_comparison(trtspec: Invoke, tiny_dir: Path, datasets: list[Path], tmp_path: Path) -> None:
    report = tmp_path / "report"
    command = ("bench", tiny_dir, "--dataset", datasets[1], "--max-new-tokens", 6, "--report", report)
    assert_done(trtspec(*command))
    assert "methods" in json.loads((report / "bench.json").read_text(encoding="utf-8"))
    assert_refused(trtspec(*command), f"--report {report} exists and is not empty", "--force")
    (report / "old.png").touch()
    assert_done(trtspec(*command, "--force"))
    assert "old.png" not in names(report)


def test_report_that_cannot_be_written_is_refused_before_measuring(
    trtspec: Invoke, tiny_dir: Path, datasets: list[Path], tmp_path: Path
) -> None:
    command = ("bench", tiny_dir, "--dataset", datasets[0], "--report")
    assert_refused(trtspec(*command, datasets[1]), f"--report {datasets[1]} is a file; choose a directory")
    assert_refused(trtspec(*command, ""), "--report", "is empty")
    for place in (tiny_dir, tiny_dir.parent):
        assert_refused(trtspec(*command, place, "--force"), f"is or holds the engine directory {tiny_dir}")
    (tmp_path / "report").mkdir()
    inside = tmp_path / "report" / "figures.json"
    assert_refused(trtspec(*command, tmp_path / "report", "--json", inside), f"--json {inside} lies in --report")


def test_draft_lengths_by_name(trtspec: Invoke, tiny_dir: Path, datasets: list[Path], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    result = trtspec(
        *("bench", tiny_dir, "--dataset", datasets[0], "--methods", "none,ngram@1,ngram", "--json", figures),
        *("--max-new-tokens", 40, "--ngram-tokens", 4),
    )
    assert_done(result)
    _, one, four = (row["metrics"] for row in json.loads(figures.read_text())["methods"])
    assert one["drafts"] == one["draft_tokens"] > 0
    assert four["draft_tokens"] > four["drafts"]
