"""Every figure that the report shows is one of the JSON object's."""

from __future__ import annotations

from typing import Any

import pytest
from bench_data import METHODS, bench_data

from trtspec.bench.figures import STAGE_ORDER, Figures, Missing, Plot, Table
from trtspec.decode.stats import STAGES

COMPARED = [*METHODS, "hf", "hf-lookup-10"]


def entry(data: dict[str, Any], dataset: str, batch: int, method: str) -> dict[str, Any]:
    """The row of the JSON object."""
    for run in data["runs"]:
        if (run["settings"]["dataset"], run["settings"]["batch_size"]) == (dataset, batch):
            [row] = [row for row in run["methods"] if row["method"] == method]
            return row
    raise AssertionError((dataset, batch))


def plot(found: Plot | Missing) -> Plot:
    assert isinstance(found, Plot)
    return found


def titles(table: Table) -> list[str]:
    return [column.title for column in table.columns]


def test_speedups() -> None:
    data = bench_data()
    speedup = plot(Figures(data).speedup())
    [panel] = speedup.panels
    assert [series.label for series in panel.series] == COMPARED
    for series in panel.series:
        assert series.x == ["edit", "chat"], "files go by their stems"
        rows = [entry(data, dataset, 1, series.label) for dataset in ("edit", "news/chat.jsonl")]
        assert series.y == [row["speedup"] for row in rows]
        assert series.low == [row["spread"]["speedup"]["min"] for row in rows]
        assert series.high == [row["spread"]["speedup"]["max"] for row in rows]
    assert [row[:2] for row in speedup.table.rows] == [(name, each) for name in ("edit", "chat") for each in COMPARED]
    row = entry(data, "news/chat.jsonl", 1, "eagle")
    speeds, ratios = row["spread"]["tokens_per_second"], row["spread"]["speedup"]
    assert speedup.table.rows[len(COMPARED) + 2] == (
        *("chat", "eagle", row["tokens_per_second"], speeds["min"], speeds["max"]),
        *(row["speedup"], ratios["min"], ratios["max"], row["metrics"]["acceptance_length"]),
    )
    assert speedup.table.rows[-1][-1] is None, "Hugging Face generate counts no steps"
    assert "of 3 repeats" in speedup.note


def test_acceptance_by_position_and_source() -> None:
    data = bench_data()
    acceptance = plot(Figures(data).acceptance())
    assert [panel.title for panel in acceptance.panels] == ["edit", "chat"]
    lines = {series.label: series for series in acceptance.panels[1].series}
    assert list(lines) == [
        *("ngram", "eagle", "ngram-eagle:union: ngram", "ngram-eagle:union: eagle"),
        *("ngram-eagle: ngram", "ngram-eagle: eagle"),
    ]
    shares = entry(data, "news/chat.jsonl", 1, "ngram-eagle")["acceptance_per_position_by_source"]["eagle"]
    assert (lines["ngram-eagle: eagle"].x, lines["ngram-eagle: eagle"].y) == ([1, 2, 3, 4], shares)
    assert lines["ngram-eagle: eagle"].dashed
    assert not lines["ngram-eagle: ngram"].dashed
    own = entry(data, "news/chat.jsonl", 1, "ngram-eagle")["metrics"]["by_source"]["eagle"]
    [found] = [row[3:] for row in acceptance.table.rows if row[:3] == ("chat", "ngram-eagle", "eagle")]
    assert found == (own["drafts"], *shares)
    assert titles(acceptance.table)[3:] == ["drafts", "at 1", "at 2", "at 3", "at 4"]


def test_time_by_stage() -> None:
    assert set(STAGE_ORDER) == set(STAGES)
    data = bench_data()
    stages = plot(Figures(data).stages())
    for panel, dataset in zip(stages.panels, ("edit", "news/chat.jsonl"), strict=True):
        assert [series.label for series in panel.series] == list(STAGE_ORDER)
        for series in panel.series:
            assert series.x == list(METHODS)
            rows = [entry(data, dataset, 1, method) for method in METHODS]
            assert series.y == [row["metrics"]["stage_ms"][series.label] / row["tokens"] for row in rows]
    row = entry(data, "edit", 1, "none")
    assert stages.table.rows[0][:2] == ("edit", "none")
    assert stages.table.rows[0][-1] == pytest.approx(sum(row["metrics"]["stage_ms"].values()) / row["tokens"])


def test_acceptance_length_against_draft_length() -> None:
    data = bench_data()
    lengths = plot(Figures(data).draft_lengths())
    series = {each.label: each for each in lengths.panels[0].series}
    assert list(series) == ["ngram", "eagle"]
    rows = [entry(data, "edit", 1, f"eagle@{length}") for length in (1, 3, 8)]
    assert series["eagle"].x == [1, 3, 8]
    assert series["eagle"].y == [row["metrics"]["acceptance_length"] for row in rows]
    metrics = rows[2]["metrics"]
    assert lengths.table.rows[5] == (
        *("edit", "eagle", 8, metrics["acceptance_length"], metrics["draft_acceptance_rate"]),
        *(metrics["match_rate"], rows[2]["speedup"]),
    )


def test_throughput_against_batch_size() -> None:
    data = bench_data(batches=(8, 1, 4))
    batches = plot(Figures(data).batches())
    assert [panel.title for panel in batches.panels] == ["edit", "chat"]
    for series in batches.panels[1].series:
        rows = [entry(data, "news/chat.jsonl", batch, series.label) for batch in (1, 4, 8)]
        assert (series.x, series.y) == ([1, 4, 8], [row["tokens_per_second"] for row in rows])
        assert series.high == [row["spread"]["tokens_per_second"]["max"] for row in rows]
    assert [each.label for each in batches.panels[0].series] == COMPARED
    assert "decodes" not in batches.note
    assert "decodes 8 sequences at once" in plot(Figures(bench_data(batches=(8, 16))).batches()).note


def test_all_figures_name_every_method_of_every_run() -> None:
    data = bench_data()
    table = Figures(data).all_figures()
    rows = [(row["method"], row["tokens_per_second"]) for run in data["runs"] for row in run["methods"]]
    where = titles(table).index("tokens/s")
    assert [(row[2], row[where]) for row in table.rows] == rows
    row = entry(data, "news/chat.jsonl", 4, "ngram@3")
    [found] = [dict(zip(titles(table), each, strict=True)) for each in table.rows if each[:3] == ("chat", 4, "ngram@3")]
    assert found["match rate"] == row["metrics"]["match_rate"]
    assert found["draft ms / token"] == row["metrics"]["draft_ms_per_token"]
    assert found["median"] == row["spread"]["tokens_per_second"]["median"]
    assert found["outside engines ms/step"] == row["outside_engines_ms_per_step"]


def test_what_was_not_measured_says_which_option_measures_it() -> None:
    figures = Figures(bench_data(datasets=["edit"], batches=[1], sweep=None, methods=["none"], repeats=1, hf=False))
    reasons = {each.name: each.reason for each in figures.plots() if isinstance(each, Missing)}
    assert {name: reason[reason.index("--") :].split()[0] for name, reason in reasons.items()} == {
        "speedup": "--methods",
        "acceptance": "--methods",
        "draft-length": "--sweep-tokens",
        "batch": "--batch-size",
    }
    assert plot(figures.stages()).panels[0].series[0].x == ["none"]


def test_without_a_decode_step_speeds_are_left() -> None:
    data = bench_data()
    for row in (row for run in data["runs"] for row in run["methods"]):
        row.update(metrics=None, step_ms=None, outside_engines_ms_per_step=None, acceptance_per_position_by_source=None)
    found = Figures(data).plots()
    assert [each.name for each in found if isinstance(each, Plot)] == ["speedup", "batch"]
    assert all("--max-new-tokens" in each.reason for each in found[2:] if isinstance(each, Missing))


def test_draft_lengths_named_by_hand_are_methods_like_others() -> None:
    data = bench_data(methods=("none", "ngram"), sweep=(2, 5), hf=False)
    for run in data["runs"]:
        run["settings"]["sweep_tokens"] = None
    figures = Figures(data)
    assert figures.methods == ["none", "ngram", "ngram@2", "ngram@5"]
    assert plot(figures.draft_lengths()).panels[0].series[0].x == [2, 5]


def test_one_repeat_has_no_whiskers() -> None:
    speedup = plot(Figures(bench_data(repeats=1)).speedup())
    assert all(series.low == series.high == [] for series in speedup.panels[0].series)
    assert "repeats" not in speedup.note


def test_datasets_with_the_same_stem_keep_their_paths() -> None:
    figures = Figures(bench_data(datasets=["a/chat.jsonl", "b/chat.jsonl"], batches=[1]))
    assert [panel.title for panel in plot(figures.stages()).panels] == ["a/chat.jsonl", "b/chat.jsonl"]
