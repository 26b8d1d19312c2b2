"""Plots as PNG files and as SVG whose colours are CSS variables, so that one drawing serves light and dark pages."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trtspec.bench.figures import BARS, LINES, Panel, Plot, Series

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#1c2126", "#d3d9de"
SERIES = ("#5f6b76", "#1f6fb4", "#b95209", "#187a50", "#8b4fb3", "#b83253", "#806414", "#0d7784")
"""On white, and in the drawing; each is unlike every other colour of a plot, since SVG gets a variable in its place."""
DARK_INK, DARK_GRID = "#e4e8ec", "#3a424a"
DARK_SERIES = ("#a3adb7", "#6cb2f0", "#f2a15f", "#5fcf9d", "#c79bea", "#f08aa3", "#d9bd6a", "#5fd0dd")
MARKERS = "osD^vPX"
_VARIABLES = {INK: "--ink", GRID: "--grid", **{color: f"--series-{n}" for n, color in enumerate(SERIES)}}
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "svg.fonttype": "none",
    # Names of prompt sets are no formulas.
    "text.parse_math": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "hatch.color": INK,
    "hatch.linewidth": 0.4,
}
_PANEL_WIDTHS = (8.4, 5.2, 3.6)
"""Inches, of one panel where one, two, or more stand side by side."""
_PANEL_HEIGHT, _LEGEND_LINE = 2.7, 0.25


def css_variables(dark: bool) -> dict[str, str]:
    """Name and value of the variables that the SVG's colours are."""
    values = (DARK_INK, DARK_GRID, *DARK_SERIES) if dark else (INK, GRID, *SERIES)
    return dict(zip(_VARIABLES.values(), values, strict=True))


def to_png(plot: Plot) -> bytes:
    """The plot on white."""
    with _style(plot.name), warnings.catch_warnings():
        # A prompt set's name may hold characters that the font lacks; the page shows them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        buffer = io.BytesIO()
        _draw(plot).savefig(buffer, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def to_svg(plot: Plot) -> str:
    """An `svg` element for a page; its ids start with the plot's name."""
    with _style(plot.name), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        buffer = io.StringIO()
        _draw(plot).savefig(
            buffer, format="svg", facecolor="none", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{plot.name}-", text)
    width = re.search(r'width="([\d.]+)pt"', text)
    assert width
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    # A point of the drawing becomes 1.35 pixels of a page that is wide enough.
    return text.replace("<svg", f'<svg class="plot" style="max-width: {1.35 * float(width[1]):.0f}px"', 1)


@contextmanager
def _style(salt: str) -> Iterator[None]:
    import matplotlib

    # It says on stderr when it builds its list of fonts, once on a machine.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):
        yield


def _draw(plot: Plot) -> Figure:
    from matplotlib.figure import Figure

    columns = min(len(_PANEL_WIDTHS), len(plot.panels))
    rows = -(-len(plot.panels) // columns)
    width = columns * _PANEL_WIDTHS[columns - 1]
    labels = list(dict.fromkeys(series.label for panel in plot.panels for series in panel.series))
    # A letter takes some 0.08 inches, a label's line and the space around it 0.7.
    in_a_line = max(1, int(width / (0.7 + 0.08 * max(map(len, labels)))))
    height = rows * _PANEL_HEIGHT + _LEGEND_LINE * -(-len(labels) // in_a_line)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    handles: dict[str, Any] = {}
    for number, (place, panel) in enumerate(zip(axes, plot.panels, strict=False)):
        _draw_panel(place, plot, panel)
        # The page's marks that stand for figures are known by their ids.
        for index, mark in enumerate(_marks(place)):
            mark.set_gid(f"data-{number}-{index}")
        found, names = place.get_legend_handles_labels()
        handles.update({name: handle for name, handle in zip(names, found, strict=True) if name not in handles})
    for place in axes[len(plot.panels) :]:
        place.set_visible(False)
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=min(len(handles), in_a_line))
    return figure


def _draw_panel(axes: Axes, plot: Plot, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    if plot.kind == BARS:
        _draw_bars(axes, plot, panel)
    elif plot.kind == LINES:
        for series in panel.series:
            _draw_line(axes, series)
        axes.set_ylim(0, _top(plot))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        _draw_stacks(axes, panel)
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.spines[["top", "right"]].set_visible(False)


def _marks(axes: Axes) -> list[Artist]:
    """What stands for figures: bars, and lines but for the baseline's and the whiskers' caps, which have no name."""
    return [*axes.patches, *(line for line in axes.lines if not str(line.get_label()).startswith("_"))]


def _draw_bars(axes: Axes, plot: Plot, panel: Panel) -> None:
    """A group of bars for each category, each bar with its value on top."""
    width = 0.8 / len(panel.series)
    for index, series in enumerate(panel.series):
        middles = [group - 0.4 + (index + 0.5) * width for group in range(len(series.x))]
        axes.bar(middles, series.y, 0.92 * width, label=series.label, **_fill(series.color))
        tops = [max(ends) for ends in zip(series.y, series.high or series.y, strict=True)]
        if series.low:
            axes.errorbar(middles, series.y, yerr=_whiskers(series), fmt="none", ecolor=INK, elinewidth=0.8, capsize=2)
        for middle, top, value in zip(middles, tops, series.y, strict=True):
            axes.annotate(
                f"{value:.2f}", (middle, top), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=7
            )
    axes.set_xticks(range(len(panel.series[0].x)), panel.series[0].x)
    axes.grid(visible=False, axis="x")
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_ylim(0, _top(plot))


def _draw_line(axes: Axes, series: Series) -> None:
    color, marker = SERIES[series.color % len(SERIES)], MARKERS[series.color % len(MARKERS)]
    (line,) = axes.plot(series.x, series.y, color=color, marker=marker, markersize=4, linewidth=1.5)
    line.set(label=series.label, linestyle="--" if series.dashed else "-")
    if series.low:
        axes.errorbar(series.x, series.y, yerr=_whiskers(series), fmt="none", ecolor=color, elinewidth=0.8, capsize=2)


def _draw_stacks(axes: Axes, panel: Panel) -> None:
    """A horizontal bar for each category, first on top, in the parts that the series are."""
    left = [0.0] * len(panel.series[0].x)
    places = range(len(left))
    for series in panel.series:
        axes.barh(places, series.y, 0.7, left=left, label=series.label, **_fill(series.color))
        left = [start + value for start, value in zip(left, series.y, strict=True)]
    axes.set_yticks(places, panel.series[0].x)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def _top(plot: Plot) -> float:
    """The end of the y axis, which a plot's panels share."""
    return 1.12 * max((y for panel in plot.panels for each in panel.series for y in (*each.y, *each.high)), default=1.0)


def _fill(color: int) -> dict[str, Any]:
    """Beyond the palette's end, the same colours come hatched."""
    return {"color": SERIES[color % len(SERIES)], "hatch": "////" if color >= len(SERIES) else None}


def _whiskers(series: Series) -> list[list[float]]:
    """Distances from the values to the ends; a median of groups may lie outside the repeats' totals."""
    below = [max(value - low, 0.0) for value, low in zip(series.y, series.low, strict=True)]
    above = [max(high - value, 0.0) for value, high in zip(series.y, series.high, strict=True)]
    return [below, above]
