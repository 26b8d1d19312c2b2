"""What the report shows, taken from the JSON object of `trtspec bench`: plots, and tables of the same figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec.bench.methods import draft_length

BARS, STACKS, LINES = "bars", "stacks", "lines"
STAGE_ORDER = ("prefill", "ngram", "eagle", "verify", "merge", "accept", "commit", "host")
_NO_STEPS = "No method made a decode step. --max-new-tokens of 2 or more gives some."
Row = Mapping[str, Any]
"""A method's entry in a run's `methods`."""


@dataclass(frozen=True)
class Series:
    """Values under one name; `x` are categories of bars and stacks, and numbers of lines."""

    label: str
    x: list[Any]
    y: list[float]
    color: int
    """Index into the palette."""
    low: list[float] = field(default_factory=list)
    """Least of all repeats, one for each y; empty where there is one repeat."""
    high: list[float] = field(default_factory=list)
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    series: list[Series]


@dataclass(frozen=True)
class Column:
    """A table's column; `digits` after the point of its numbers, None: text."""

    title: str
    digits: int | None = None


@dataclass(frozen=True)
class Table:
    """Cells are text, numbers, or None where nothing was measured."""

    columns: tuple[Column, ...]
    rows: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Plot:
    """A plot and its figures."""

    name: str
    title: str
    kind: str
    x_label: str
    y_label: str
    panels: list[Panel]
    table: Table
    note: str = ""


@dataclass(frozen=True)
class Missing:
    """A plot without data, and how to get them."""

    name: str
    title: str
    reason: str


class Figures:
    """The plots of one `trtspec bench`."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        """`data`: a single comparison, or several under `runs`."""
        self.runs: list[Mapping[str, Any]] = data.get("runs", [data])
        self.settings: Mapping[str, Any] = self.runs[0]["settings"]
        self.datasets = _short_names([run["settings"]["dataset"] for run in self.runs])
        self.batch_sizes = list(dict.fromkeys(run["settings"]["batch_size"] for run in self.runs))
        self.repeated = self.settings["repeats"] > 1
        names = [row["method"] for row in self.runs[0]["methods"]]
        self.swept = [name for name in names if self.settings["sweep_tokens"] and draft_length(name) is not None]
        self.methods = [name for name in names if name not in self.swept]
        self._colors = {name: index for index, name in enumerate(self.methods)}

    def plots(self) -> list[Plot | Missing]:
        """Every plot of the page, in its order."""
        return [self.speedup(), self.acceptance(), self.stages(), self.draft_lengths(), self.batches()]

    def speedup(self) -> Plot | Missing:
        """Speed-up by dataset and method, with the first batch size."""
        name, title = "speedup", "Speed-up by dataset and method"
        if len(self.methods) < 2:
            return Missing(name, title, "One method was run. --methods gives several, the first of which is the base.")
        first = self._first_batch()
        series = []
        for method in self.methods:
            rows = [_row(run, method) for run in first]
            low, high = self._ends(rows, "speedup")
            speedups = [row["speedup"] for row in rows]
            names = [self._name(run) for run in first]
            series.append(Series(method, names, speedups, self._colors[method], low, high))
        cells = []
        for run, row in self._measured(first):
            speeds, ratios = row["spread"]["tokens_per_second"], row["spread"]["speedup"]
            figures = (row["tokens_per_second"], speeds["min"], speeds["max"])
            ratio = (row["speedup"], ratios["min"], ratios["max"])
            cells.append((self._name(run), row["method"], *figures, *ratio, _metric(row, "acceptance_length")))
        headings = (("tokens/s", 1), ("min", 1), ("max", 1), ("speed-up", 2), ("min", 2), ("max", 2))
        columns = _columns("dataset", "method", *headings, ("acceptance length", 2))
        base = self.runs[0]["baseline"]
        panel = Panel("", series)
        note = f"The base is {base}, batch size {self.batch_sizes[0]}."
        if self.repeated:
            note += f" Whiskers, min and max are those of {self.settings['repeats']} repeats."
        return Plot(name, title, BARS, "dataset", f"speed-up over {base}", [panel], Table(columns, cells), note)

    def acceptance(self) -> Plot | Missing:
        """Acceptance by place on the draft path, of each method's drafters."""
        name, title = "acceptance", "Acceptance by position and source"
        panels: list[Panel] = []
        rows: list[tuple[Any, ...]] = []
        for run in self._first_batch():
            series = []
            for _, row in self._measured([run]):
                for source, shares in (row["acceptance_per_position_by_source"] or {}).items():
                    drafts = row["metrics"]["by_source"][source]["drafts"]
                    if not drafts:
                        continue
                    label = row["method"] if row["method"] == source else f"{row['method']}: {source}"
                    positions = list(range(1, len(shares) + 1))
                    color = self._colors[row["method"]]
                    series.append(Series(label, positions, shares, color, dashed=source == "eagle"))
                    rows.append((self._name(run), row["method"], source, drafts, *shares))
            panels.append(Panel(self._name(run), series))
        if not rows:
            reason = "No draft token was accepted. --methods takes ngram, and eagle where DIR has a draft head."
            return Missing(name, title, reason)
        longest = max(len(row) for row in rows)
        rows = [row + (None,) * (longest - len(row)) for row in rows]
        headings = [(f"at {at}", 3) for at in range(1, longest - 3)]
        columns = _columns("dataset", "method", "source", ("drafts", 0), *headings)
        note = f"Batch size {self.batch_sizes[0]}. Dashed: EAGLE's draft tokens."
        return Plot(name, title, LINES, "position", "accepted / drafts", panels, Table(columns, rows), note)

    def stages(self) -> Plot | Missing:
        """Time by stage for each generated token."""
        name, title = "stages", "Time by stage"
        panels, rows = [], []
        for run in self._first_batch():
            measured = [row for _, row in self._measured([run]) if row["metrics"]]
            per_token = [
                {stage: ms / row["tokens"] for stage, ms in row["metrics"]["stage_ms"].items()} for row in measured
            ]
            methods = [row["method"] for row in measured]
            panels.append(
                Panel(
                    self._name(run),
                    [
                        Series(stage, methods, [each[stage] for each in per_token], color)
                        for color, stage in enumerate(STAGE_ORDER)
                    ],
                )
            )
            rows += [
                (self._name(run), method, *(each[stage] for stage in STAGE_ORDER), sum(each.values()))
                for method, each in zip(methods, per_token, strict=True)
            ]
        if not rows:
            return Missing(name, title, _NO_STEPS)
        columns = _columns("dataset", "method", *((stage, 3) for stage in (*STAGE_ORDER, "sum")))
        note = f"Milliseconds for each generated token, batch size {self.batch_sizes[0]}, of the first repeat."
        return Plot(name, title, STACKS, "ms per token", "", panels, Table(columns, rows), note)

    def draft_lengths(self) -> Plot | Missing:
        """Acceptance length against draft length."""
        name, title = "draft-length", "Acceptance length against draft length"
        names = [row["method"] for row in self.runs[0]["methods"] if draft_length(row["method"]) is not None]
        if not names:
            return Missing(name, title, "Draft lengths were not varied. --sweep-tokens 1,2,3,5,8,10 measures several.")
        stems = list(dict.fromkeys(each.partition("@")[0] for each in names))
        panels, rows = [], []
        for run in self._first_batch():
            series = []
            for index, stem in enumerate(stems):
                varied = {draft_length(each): _row(run, each) for each in names if each.partition("@")[0] == stem}
                lengths = sorted(length for length in varied if length is not None and varied[length]["metrics"])
                found = [varied[length] for length in lengths]
                values = [row["metrics"]["acceptance_length"] for row in found]
                series.append(Series(stem, lengths, values, self._colors.get(stem, index)))
                for length, value, row in zip(lengths, values, found, strict=True):
                    rate, match = row["metrics"]["draft_acceptance_rate"], row["metrics"]["match_rate"]
                    rows.append((self._name(run), stem, length, value, rate, match, row["speedup"]))
            panels.append(Panel(self._name(run), series))
        if not rows:
            return Missing(name, title, _NO_STEPS)
        figures = (("acceptance length", 3), ("draft acceptance rate", 3), ("match rate", 3), ("speed-up", 2))
        columns = _columns("dataset", "method", ("draft length", 0), *figures)
        note = f"Batch size {self.batch_sizes[0]}. The draft length is --ngram-tokens and --eagle-tokens alike."
        return Plot(name, title, LINES, "draft length", "acceptance length", panels, Table(columns, rows), note)

    def batches(self) -> Plot | Missing:
        """Throughput against batch size."""
        name, title = "batch", "Throughput against batch size"
        if len(self.batch_sizes) < 2:
            return Missing(name, title, "One batch size was run. --batch-size 1,4,8 measures several.")
        panels, rows = [], []
        for dataset in dict.fromkeys(self.datasets.values()):
            runs = [run for run in self.runs if self._name(run) == dataset]
            series = []
            for method in self.methods:
                found = [(run["settings"]["batch_size"], _row(run, method)) for run in runs]
                found.sort(key=lambda each: each[0])
                speeds = [row["tokens_per_second"] for _, row in found]
                spreads = [row["spread"]["tokens_per_second"] for _, row in found]
                low, high = self._ends([row for _, row in found], "tokens_per_second")
                series.append(Series(method, [batch for batch, _ in found], speeds, self._colors[method], low, high))
                for (batch, row), each in zip(found, spreads, strict=True):
                    figures = (row["tokens_per_second"], each["min"], each["max"], row["speedup"])
                    rows.append((dataset, method, batch, *figures))
            panels.append(Panel(dataset, series))
        columns = _columns(
            *("dataset", "method", ("batch size", 0), ("tokens/s", 1), ("min", 1), ("max", 1), ("speed-up", 2))
        )
        note = "Prompts are taken in groups of the batch size; the last group may be smaller."
        if (slots := self.settings["max_batch_size"]) < max(self.batch_sizes):
            note += f" This engine directory decodes {slots} sequences at once; others wait for a free slot."
        return Plot(name, title, LINES, "batch size", "tokens/s", panels, Table(columns, rows), note)

    def all_figures(self) -> Table:
        """Every method of every run."""
        names = ["acceptance_length", "acceptance_length_per_draft", "draft_acceptance_rate", "match_rate"]
        names += ["system_efficiency", "draft_ms_per_token"]
        rows = []
        for run in self.runs:
            for row in run["methods"]:
                spread = row["spread"]["tokens_per_second"]
                speed = (row["tokens"], row["tokens_per_second"], spread["min"], spread["median"], spread["max"])
                metrics = [_metric(row, name) for name in names]
                steps = (row["step_ms"], row["outside_engines_ms_per_step"])
                rows.append(
                    (
                        self._name(run),
                        run["settings"]["batch_size"],
                        row["method"],
                        *speed,
                        row["speedup"],
                        *metrics,
                        *steps,
                    )
                )
        speeds = (("tokens/s", 1), ("min", 1), ("median", 1), ("max", 1), ("speed-up", 2))
        titles = [(name.replace("_", " ").replace(" ms per", " ms /"), 3) for name in names]
        steps_ms = (("ms/step", 2), ("outside engines ms/step", 3))
        where = ("dataset", ("batch size", 0), "method", ("tokens", 0))
        return Table(_columns(*where, *speeds, *titles, *steps_ms), rows)

    def _ends(self, rows: Seq[Row], figure: str) -> tuple[list[float], list[float]]:
        """Min and max over the repeats; nothing where there is one."""
        spreads = [row["spread"][figure] for row in rows] if self.repeated else []
        return [spread["min"] for spread in spreads], [spread["max"] for spread in spreads]

    def _first_batch(self) -> list[Mapping[str, Any]]:
        return [run for run in self.runs if run["settings"]["batch_size"] == self.batch_sizes[0]]

    def _name(self, run: Mapping[str, Any]) -> str:
        return self.datasets[run["settings"]["dataset"]]

    def _measured(self, runs: Seq[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Row]]:
        """The rows of the methods that no sweep added."""
        return ((run, row) for run in runs for row in run["methods"] if row["method"] not in self.swept)


def _row(run: Mapping[str, Any], method: str) -> Row:
    row: Row = next(row for row in run["methods"] if row["method"] == method)
    return row


def _metric(row: Row, name: str) -> float | None:
    """None for a method that doesn't count its steps."""
    value: float | None = row["metrics"][name] if row["metrics"] else None
    return value


def _columns(*titles: str | tuple[str, int]) -> tuple[Column, ...]:
    return tuple(Column(title) if isinstance(title, str) else Column(*title) for title in titles)


def _short_names(datasets: Seq[str]) -> dict[str, str]:
    """Files by their stems where these differ."""
    stems = {name: Path(name).stem for name in datasets}
    return stems if len(set(stems.values())) == len(stems) else {name: name for name in stems}
