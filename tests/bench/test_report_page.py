"""The report's page in a browser, in light and dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_data import bench_data
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from trtspec.bench.figures import Figures, Plot
from trtspec.bench.report import write_report
from trtspec.bench.runner import Difference

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
    *("--window-size=1100,1400", "--allow-file-access-from-files"),
)
PLOTS = ("speedup", "acceptance", "stages", "draft-length", "batch")
# WCAG's relative luminance, and what each text and each mark of the page has: [contrast with the page, what it is].
CONTRASTS = """
const parse = (color) => {
  const found = color.match(/[\\d.]+/g);
  return found && !(found.length === 4 && Number(found[3]) === 0) ? found.slice(0, 3).map(Number) : null;
};
const luminance = (rgb) => rgb.map((value) => value / 255)
  .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
  .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
const page = luminance(parse(getComputedStyle(document.body).backgroundColor));
const contrast = (color) => {
  const own = luminance(parse(color));
  return (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05);
};
const texts = [...document.querySelectorAll("svg text")]
  .map((at) => [contrast(getComputedStyle(at).fill), at.textContent]);
for (const at of document.querySelectorAll("h1, h2, p, td, th, dt, dd, summary"))
  texts.push([contrast(getComputedStyle(at).color), at.textContent.slice(0, 40)]);
const drawn = [...document.querySelectorAll('svg [id*="-data-"] :is(path, use)')].filter((at) => !at.closest("defs"));
const marks = drawn.map((at) => {
  const { fill, stroke } = getComputedStyle(at);
  return [contrast(fill !== "none" ? fill : stroke), at.parentNode.id];
});
return [texts, marks];
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    if not BROWSER or not DRIVER:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return bench_data()


@pytest.fixture(scope="module")
def report(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report") / "report"
    write_report(data, directory, force=False)
    return directory


def open_page(browser: webdriver.Chrome, page: Path, scheme: str = "light") -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(page.as_uri())


def texts(browser: webdriver.Chrome, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((at) => at.textContent.trim())"
    found: list[str] = browser.execute_script(script, selector)
    return found


def test_page_asks_for_nothing_and_reports_no_error(browser: webdriver.Chrome, report: Path) -> None:
    open_page(browser, report / "index.html")
    assert browser.get_log("browser") == []
    asked = [entry["message"] for entry in browser.get_log("performance") if "requestWillBeSent" in entry["message"]]
    assert asked
    assert all((report / "index.html").as_uri() in message or '"data:' in message for message in asked)
    assert browser.title == "trtspec bench: tiny & <small>"
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways"


def test_every_plot_has_labels_and_all_its_data(browser: webdriver.Chrome, report: Path, data: dict[str, Any]) -> None:
    open_page(browser, report / "index.html")
    plots = {plot.name: plot for plot in Figures(data).plots() if isinstance(plot, Plot)}
    assert tuple(plots) == PLOTS
    for name, plot in plots.items():
        labels = texts(browser, f"#{name} svg text")
        series = [each for panel in plot.panels for each in panel.series]
        assert {plot.x_label, *(each.label for each in series)} <= set(labels)
        assert {panel.title for panel in plot.panels} - {""} <= set(labels)
        assert any(label.replace(".", "").isdigit() for label in labels), "the axes have numbers"
        marks = browser.execute_script(
            """return [...document.querySelectorAll(`#${arguments[0]} svg [id*="-data-"]`)].map((at) => {
                 const box = at.getBoundingClientRect(); return box.width + box.height; })""",
            name,
        )
        assert len(marks) == (len(series) if plot.kind == "lines" else sum(len(each.y) for each in series))
        assert all(size > 0 for size in marks)


def test_ids_are_unique_and_references_lead_somewhere(browser: webdriver.Chrome, report: Path) -> None:
    open_page(browser, report / "index.html")
    ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map((at) => at.id)")
    assert len(set(ids)) == len(ids)
    used = browser.execute_script(
        "return [...document.querySelectorAll('use')].map((at) => at.href.baseVal.slice(1))"
    ) + browser.execute_script(
        "return [...document.querySelectorAll('[clip-path]')].map((at) => at.getAttribute('clip-path').slice(5, -1))"
    )
    assert used
    assert set(used) <= set(ids)


def test_tables_hold_the_figures(browser: webdriver.Chrome, report: Path, data: dict[str, Any]) -> None:
    open_page(browser, report / "index.html")
    figures = Figures(data)
    tables = {plot.name: plot.table for plot in figures.plots() if isinstance(plot, Plot)}
    for name, table in {**tables, "all": figures.all_figures()}.items():
        assert texts(browser, f"#{name} thead th") == [column.title for column in table.columns]
        cells = [cell for row in table.rows for cell in row]
        assert len(texts(browser, f"#{name} tbody td")) == len(cells)
        shown = browser.execute_script(
            "return [...document.querySelectorAll(`#${arguments[0]} td[data-value]`)].map((at) => at.dataset.value)",
            name,
        )
        assert [float(value) for value in shown] == [cell for cell in cells if isinstance(cell, int | float)]
    assert texts(browser, "#speedup tbody tr:first-child td")[2] == f"{tables['speedup'].rows[0][2]:.1f}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_legible(browser: webdriver.Chrome, report: Path, scheme: str) -> None:
    open_page(browser, report / "index.html", scheme)
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    written, marks = browser.execute_script(CONTRASTS)
    assert len(written) > 200
    assert len(marks) > 100
    assert [each for each in written if each[0] < 4.5] == []
    assert [each for each in marks if each[0] < 3] == []


def test_narrow_screen(browser: webdriver.Chrome, report: Path) -> None:
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_page(browser, report / "index.html")
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_losslessness_and_settings(browser: webdriver.Chrome, report: Path, tmp_path: Path) -> None:
    open_page(browser, report / "index.html")
    said = " ".join(texts(browser, "#losslessness p")[0].split())
    assert said == (
        "Every method gave the tokens of none on every prompt: edit at batch size 1 (20 prompts), "
        "edit at batch size 4 (20 prompts), chat at batch size 1 (20 prompts), chat at batch size 4 (20 prompts)."
    )
    settings = dict(zip(texts(browser, "#settings th"), texts(browser, "#settings td"), strict=True))
    assert settings["dataset"] == "edit (20 prompts), news/chat.jsonl (20 prompts)"
    expected = {"batch size": "1, 4", "threads": "2", "cpu": "a processor, 2 cores", "gpu": "-", "ngram tokens": "10"}
    assert settings.items() >= expected.items()

    differences = [Difference("ngram", "<b>", 3, 17, None, None), Difference("eagle", "p", 5, 1, 2, 0.25)]
    lying = bench_data(datasets=["edit"], batches=[1], sweep=None, differences=differences, repeats=1)
    write_report(lying, tmp_path / "report", force=False)
    open_page(browser, tmp_path / "report" / "index.html")
    assert texts(browser, "#losslessness p")[0] == "Methods gave different tokens (2 differences)."
    cells = texts(browser, "#losslessness tbody td")
    assert cells == ["edit", "1", "ngram", "<b>", "3", "17", "-", "-", "edit", "1", "eagle", "p", "5", "1", "2", "0.25"]
    missing = {each: texts(browser, f"#{each} .missing") for each in ("draft-length", "batch")}
    assert missing == {
        "draft-length": ["Draft lengths were not varied. --sweep-tokens 1,2,3,5,8,10 measures several."],
        "batch": ["One batch size was run. --batch-size 1,4,8 measures several."],
    }
