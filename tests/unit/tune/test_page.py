"""The page of a run: what it shows, and in a real browser, what it does.

The browser is QtWebEngine: `pip install PySide6`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from documents import ROOT
from torchserve_openvino.tune.page import to_html
from torchserve_openvino.tune.search import SearchResult, Standing
from tuned import BEST, DEAD, PRESENT, SLOWER, facts

browser = pytest.mark.skipif(
    importlib.util.find_spec("PySide6") is None or importlib.util.find_spec("PySide6.QtWebEngineCore") is None,
    reason="no browser is installed: pip install PySide6",
)


def opened(folder: Path, page: str, *steps: tuple[str, str]) -> dict[str, Any]:
    (folder / "page.html").write_text(page, encoding="utf-8")
    (folder / "steps.json").write_text(json.dumps(steps))
    program = ROOT / "tests" / "browser.py"
    environment = {**os.environ, "QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": "--no-sandbox"}
    done = subprocess.run(
        [sys.executable, program, "page.html", "steps.json", "result.json", "page.png"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    result = folder / "result.json"
    assert result.exists(), done.stderr
    seen: dict[str, Any] = json.loads(result.read_text())
    assert seen["loaded"]
    assert seen["console"] == []
    # Nothing but the page itself is read.
    assert [url.rsplit("/", 1)[-1] for url in seen["requests"]] == ["page.html"]
    assert (folder / "page.png").stat().st_size > 10_000
    return seen


def first_cells(table: str) -> str:
    return f'[...document.querySelectorAll("#{table} tbody tr")].map(row => row.cells[0].textContent)'


MARKED = '[...document.querySelectorAll("circle.marked")].map(each => each.dataset.candidate)'
DETAIL = 'document.getElementById("detail").textContent'


@browser
def test_a_browser_shows_tables_plot_and_front(tmp_path: Path) -> None:
    seen = opened(
        tmp_path, to_html(facts()),
        ("script", first_cells("servers")),
        ("script", 'document.querySelectorAll("#plot circle").length'),
        ("script", 'document.getElementById("front").getTotalLength() > 10'),
        ("script", 'getComputedStyle(document.querySelector("td.best")).color'),
        ("script", '[...document.querySelectorAll("table")].every(each => each.getBoundingClientRect().height > 20)'),
        ("script", "document.documentElement.scrollWidth <= window.innerWidth"),
    )  # fmt: skip
    configurations, windows, front, color, tables, fits = seen["values"]
    assert configurations == [str(each) for each in (PRESENT, BEST, SLOWER, DEAD)]
    # The window without a p99 has no point.
    assert windows == 7 and front and tables and fits
    assert color == "rgb(10, 125, 79)"


@browser
def test_points_and_rows_show_what_belongs_together(tmp_path: Path) -> None:
    seen = opened(
        tmp_path, to_html(facts()),
        ("script", MARKED),
        ("hover", "#plot circle"),
        ("script", MARKED),
        ("script", DETAIL),
        ("hover", "h1"),
        ("script", MARKED),
        ("click", "#servers tbody tr:nth-child(2)"),
        ("hover", "h1"),
        ("script", MARKED),
        ("script", DETAIL),
        ("click", "#servers tbody tr:nth-child(2)"),
        ("hover", "h1"),
        ("script", MARKED),
    )  # fmt: skip
    before, hovered, detail, left, kept, kept_detail, released = seen["values"]
    assert before == left == released == []
    assert set(hovered) == {str(PRESENT)} and "50.0 requests/s, p99 60 ms, held" in detail
    # A click keeps the configuration until the next one.
    assert kept == [str(BEST)] * 4 and kept_detail == str(BEST)


@browser
def test_tables_are_sorted_by_a_click(tmp_path: Path) -> None:
    seen = opened(
        tmp_path, to_html(facts()),
        ("click", "#servers th:nth-child(2) button"),
        ("script", first_cells("servers")),
        ("click", "#servers th:nth-child(2) button"),
        ("script", first_cells("servers")),
        ("script", 'document.querySelector("#servers th:nth-child(2)").getAttribute("aria-sort")'),
        ("click", "#servers th:nth-child(1) button"),
        ("script", first_cells("servers")),
    )  # fmt: skip
    down, up, direction, named = seen["values"]
    # The one without a score is the last in both directions.
    assert down == [str(each) for each in (BEST, SLOWER, PRESENT, DEAD)]
    assert up == [str(each) for each in (PRESENT, SLOWER, BEST, DEAD)] and direction == "ascending"
    # 5 ms before 20 ms: numbers in names count as such.
    assert named == [str(each) for each in (BEST, SLOWER, PRESENT, DEAD)]


@browser
def test_a_run_without_any_window_opens_too(tmp_path: Path) -> None:
    none = SearchResult([Standing(PRESENT, left="no rate at which the limit holds")], None, "no candidate serves", 1)
    page = to_html(facts(choice=none, trials=[], confirmation=None, claim=None))
    seen = opened(tmp_path, page, ("script", first_cells("servers")), ("click", "#servers th button"))
    assert seen["values"] == [[str(PRESENT)]]
    assert "No window was measured" in page and "None: the present configuration stays" in page


def test_the_page_names_the_reasons_and_loads_nothing() -> None:
    page = to_html(facts())
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", page)
    for text in (
        "2.38 (2.27 to 2.5) times",
        "it did not become READY: &lt;no memory&gt;",
        "wrong answer to a.json",
        "missed the limit",
        "disturbed: other processes took 1.20 cores",
        "padding 72% before, 8% after",
        "batchSize: 8",
        "Points on the top edge lie above it: 1.",
        "limit 100 ms",
    ):
        assert text in page, text


def test_the_front_holds_no_disturbed_window() -> None:
    (points,) = re.findall(r'id="front" points="([^"]+)"', to_html(facts()))
    # Of the choice at 120 and 60 requests/s; 130 was measured beside another process.
    assert len(points.split()) == 2


def test_axes_have_round_numbers() -> None:
    numbers = [float(each) for each in re.findall(r'<text x="[\d.]+" y="[\d.]+" text-anchor="\w+">([\d.]+)</text>',
                                                  to_html(facts()))]  # fmt: skip
    assert numbers == [0, 20, 40, 60, 80, 100, 120, 140, 0, 50, 100, 150, 200, 250, 300]


def test_the_effect_of_a_key_is_shown_where_all_else_is_equal() -> None:
    effects = {(each["key"], each["value"]): each for each in facts()["effects"]}
    assert set(effects) == {("precision", "f32"), ("maxBatchDelay", "20")}
    assert effects["maxBatchDelay", "20"]["times"] == 0.76
    # 6 ms against 10, and 30 against 70: the geometric mean.
    assert effects["precision", "f32"]["times"] == pytest.approx((0.6 * 3 / 7) ** 0.5, abs=1e-3)
