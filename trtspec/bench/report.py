"""The report of `trtspec bench`: an HTML page that needs no other file, its plots as PNG, its figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from trtspec.bench.figures import Figures, Missing, Plot
from trtspec.errors import DependencyError
from trtspec.staging import check_output, staged_directory

PAGE, FIGURES = "index.html", "bench.json"
_TEMPLATE = "report.html.jinja"


def check_report(directory: Path, *, force: bool, engine_dir: Path | None = None) -> None:
    """Refuse, before hours of measuring, what `write_report` would refuse.

    Args:
        engine_dir: what is measured, which a report must not replace.

    Raises:
        DependencyError: a package that draws is not installed.
        UserError: the directory exists and is not empty and `force` is not given, or is no place for a report.
    """
    for package in ("matplotlib", "jinja2"):
        try:
            import_module(package)
        except ImportError:
            raise DependencyError(package, "--report", "bench") from None
    check_output(directory, force=force, source=engine_dir, what="engine directory", option="--report", marker=FIGURES)


def write_report(data: Mapping[str, Any], directory: Path, *, force: bool) -> None:
    """Write the page, its plots and its figures into `directory`, which appears complete or not at all.

    Args:
        data: the JSON object of `trtspec bench --json`.

    Raises:
        DependencyError, UserError: as for `check_report`.
    """
    check_report(directory, force=force)
    from trtspec.bench.plots import to_png

    figures = Figures(data)
    with staged_directory(directory, force=force, option="--report") as staging:
        for plot in figures.plots():
            if isinstance(plot, Plot):
                (staging / f"{plot.name}.png").write_bytes(to_png(plot))
        (staging / PAGE).write_text(page(figures), encoding="utf-8")
        (staging / FIGURES).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def page(figures: Figures) -> str:
    """The HTML page; it needs no other file."""
    import jinja2

    from trtspec.bench.plots import css_variables, to_svg

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = (resources.files(__package__) / "data" / _TEMPLATE).read_text(encoding="utf-8")
    sections = [{"plot": plot, "svg": None if isinstance(plot, Missing) else to_svg(plot)} for plot in figures.plots()]
    return environment.from_string(source).render(
        figures=figures,
        sections=sections,
        settings=_settings(figures),
        differences=[(run, at) for run in figures.runs for at in run["differences"]],
        light=css_variables(dark=False),
        dark=css_variables(dark=True),
    )


def _settings(figures: Figures) -> dict[str, str]:
    """What the page says of how it was measured, by name."""
    own = figures.settings
    varied = {"dataset", "batch_size"}
    prompts = {run["settings"]["dataset"]: run["prompts"] for run in figures.runs}
    first = {
        "dataset": ", ".join(f"{name} ({count} prompt{'s' if count > 1 else ''})" for name, count in prompts.items()),
        "batch size": ", ".join(map(str, figures.batch_sizes)),
    }
    return {**first, **{name.replace("_", " "): _text(value) for name, value in own.items() if name not in varied}}


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
