"""The report's files: complete or absent, small, and nothing in them but figures."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from bench_data import bench_data

from trtspec.bench import report as report_module
from trtspec.bench.figures import Figures, Plot
from trtspec.bench.plots import DARK_SERIES, SERIES, to_png, to_svg
from trtspec.bench.report import check_report, write_report
from trtspec.errors import DependencyError, UserError

PNG = b"\x89PNG\r\n\x1a\n"


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def test_files(tmp_path: Path) -> None:
    data = bench_data()
    write_report(data, tmp_path / "report", force=False)
    plots = {"speedup.png", "acceptance.png", "stages.png", "draft-length.png", "batch.png"}
    assert names(tmp_path / "report") == {"index.html", "bench.json", *plots}
    assert names(tmp_path) == {"report"}
    assert json.loads((tmp_path / "report" / "bench.json").read_text(encoding="utf-8")) == data
    assert all((tmp_path / "report" / name).read_bytes().startswith(PNG) for name in plots)
    assert (tmp_path / "report" / "index.html").stat().st_size < 1_000_000


def test_a_plot_without_data_has_no_file(tmp_path: Path) -> None:
    data = bench_data(datasets=["edit"], batches=[1], sweep=None)
    write_report(data, tmp_path / "report", force=False)
    assert names(tmp_path / "report") == {"index.html", "bench.json", "speedup.png", "acceptance.png", "stages.png"}


def test_a_directory_that_is_not_empty_stays_unless_forced(tmp_path: Path) -> None:
    data = bench_data(datasets=["edit"], batches=[1], sweep=None, hf=False, repeats=1)
    (tmp_path / "old.txt").write_text("mine")
    with pytest.raises(UserError, match=r"--report .* exists and is not empty; .* or add --force"):
        check_report(tmp_path, force=False)
    with pytest.raises(UserError, match="is not empty"):
        write_report(data, tmp_path, force=False)
    with pytest.raises(UserError, match=r"holds no bench\.json"):
        check_report(tmp_path, force=True)
    assert names(tmp_path) == {"old.txt"}
    (tmp_path / "bench.json").write_text("{}")
    check_report(tmp_path, force=True)
    write_report(data, tmp_path, force=True)
    assert "old.txt" not in names(tmp_path)
    assert "index.html" in names(tmp_path)


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(figures: Figures) -> str:
        raise RuntimeError("no page")

    monkeypatch.setattr(report_module, "page", fail)
    with pytest.raises(RuntimeError):
        write_report(bench_data(datasets=["edit"], batches=[1], sweep=None), tmp_path / "report", force=False)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    def absent(name: str) -> Any:
        if name == package:
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(report_module, "import_module", absent)
    with pytest.raises(DependencyError, match=rf"--report needs the package {package}; .*'trtspec\[bench\]'"):
        check_report(tmp_path / "report", force=False)


def test_drawing_packages_are_imported_late(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = builtins.__import__

    def spy(name: str, *args: Any, **kwargs: Any) -> Any:
        assert name.split(".")[0] not in ("matplotlib", "jinja2")
        return honest(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", spy)
    Figures(bench_data())


def test_drawing_is_repeatable_and_takes_names_as_they_are() -> None:
    data = bench_data(datasets=["$x^2$", "<b>&", "価格"], batches=[1], sweep=None)
    figures = Figures(data)
    for plot in figures.plots():
        if isinstance(plot, Plot):
            svg = to_svg(plot)
            assert svg == to_svg(plot)
            assert all(name in svg for name in ("$x^2$", "&lt;b&gt;&amp;", "価格"))
            assert "#1c2126" not in svg
            assert to_png(plot).startswith(PNG)


def test_more_methods_than_colours() -> None:
    methods = ("none", *(f"ngram@{length}" for length in range(1, 12)))
    data = bench_data(datasets=["edit"], batches=[1], methods=methods, sweep=None, hf=False)
    svg = to_svg(Figures(data).speedup())  # type: ignore[arg-type]
    assert all(f"{name}</text>" in svg for name in methods)
    assert len(SERIES) == len(DARK_SERIES) < len(methods)
