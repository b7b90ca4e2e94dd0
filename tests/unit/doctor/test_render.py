"""Rendered diagnoses: each is built from the dict alone and is well-formed."""

import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from torchserve_openvino.doctor.diagnosis import Diagnosis
from torchserve_openvino.doctor.rendering.picture import lay_out, to_dot, to_html
from torchserve_openvino.doctor.rendering.print_diagnosis import print_diagnosis

VOID = {"meta", "br", "img", "link", "input", "path", "rect"}


@pytest.fixture(scope="module")
def ill(ill: Diagnosis) -> dict[str, Any]:
    return ill.to_dict()


class Balanced(HTMLParser):
    """Checks that every opened tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [str(value) for name, value in attrs if name in {"src", "href", "data", "srcset"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(ill: dict[str, Any]) -> None:
    page = to_html(ill)
    parser = Balanced()
    parser.feed(page)
    assert not parser.open and not parser.loaded
    assert not re.search(r"@import|url\(|<script|<link", page)
    assert "prefers-color-scheme: dark" in page
    for item in ill["refused"]:
        assert item["op"] in page
    for step in (step for item in ill["refused"] for step in item["next_steps"]):
        assert step["title"].replace("'", "&#39;") in page


def test_each_graph_is_an_svg_with_a_box_for_each_part(ill: dict[str, Any]) -> None:
    found = re.findall(r"<svg.*?</svg>", to_html(ill), re.DOTALL)
    assert len(found) == len(ill["pictures"])
    for text, picture in zip(found, ill["pictures"], strict=True):
        svg = ElementTree.fromstring(text)
        names = [element.tag.rpartition("}")[2] for element in svg.iter()]
        assert names.count("rect") == len(picture["boxes"]) and names.count("path") == len(picture["edges"])


def test_what_a_model_is_called_is_no_html(ill: dict[str, Any]) -> None:
    page = to_html({**ill, "model": "<script>alert(1)</script>"})
    assert "<script>" not in page


def test_boxes_do_not_overlap_and_lie_below_what_they_need(ill: dict[str, Any]) -> None:
    for picture in ill["pictures"]:
        layout = lay_out(picture)
        placed = {each.box["id"]: each for each in layout.boxes}
        for first, second in picture["edges"]:
            assert placed[first].y + placed[first].height < placed[second].y
        for a in layout.boxes:
            assert a.x >= 0 and a.x + a.width <= layout.width and a.y + a.height <= layout.height
            for b in layout.boxes:
                assert a is b or a.y != b.y or a.x + a.width <= b.x or b.x + b.width <= a.x


def test_an_empty_graph_has_an_empty_picture() -> None:
    layout = lay_out({"boxes": [], "edges": []})
    assert (layout.width, layout.height, layout.boxes) == (0.0, 0.0, [])


def test_dot_text_is_well_formed(ill: dict[str, Any]) -> None:
    text = to_dot({**ill, "model": 'a "quoted" \\ name'})
    assert text.startswith('digraph "a \\"quoted\\" \\\\ name" {')
    assert text.count("{") == text.count("}") and text.rstrip().endswith("}")
    statement = re.compile(r'^\s*("[^"]+" (\[.*\]|-> "[^"]+");|subgraph cluster_\d+ \{|\}|\w+(=| \[).*;)$')
    for line in text.splitlines()[1:]:
        assert statement.match(line), line
    declared = set(re.findall(r'^\s+"(\w+)" \[', text, re.MULTILINE))
    for first, second in re.findall(r'"(\w+)" -> "(\w+)"', text):
        assert {first, second} <= declared


def test_the_terminal_shows_everything(ill: dict[str, Any]) -> None:
    shown = printed(ill)
    for item in ill["refused"]:
        assert item["op"] in shown and item["source"] in shown
    assert "aten.addmv.default" in shown and "op_mappings: my_ops.py" in shown
    assert "def illlib_swishy(x, beta=1.0):" in shown
    assert "translate_hypot" not in shown and "translate_hypot" in printed(ill, cpp=True)


def printed(diagnosis: dict[str, Any], **options: bool) -> str:
    out = io.StringIO()
    print_diagnosis(diagnosis, Console(file=out, width=200), **options)
    return out.getvalue()


def test_an_operator_with_brackets_is_no_markup(ill: dict[str, Any], tmp_path: Path) -> None:
    odd = {**ill, "model": "[bold]x[/bold]"}
    assert "[bold]x[/bold]" in printed(odd)


def test_a_page_shows_an_answer_that_is_no_number(ill: dict[str, Any]) -> None:
    # What JSON has for infinity, where the compiled answer is NaN or of another shape.
    page = to_html({**ill, "comparison": {**ill["comparison"], "max_abs": "inf", "verdict": "has NaN"}})
    assert ">inf</b>has NaN" in page


def test_a_reason_may_be_empty(ill: dict[str, Any]) -> None:
    fallback = {"kind": "runtime_failed", "op": "x", "to": "eager", "count": 1, "where": "", "reason": ""}
    breaks = [{**each, "reason": ""} for each in ill["graph_breaks"]]
    odd = {**ill, "fallbacks": [fallback], "graph_breaks": breaks}
    assert breaks and "no reason is known" in to_html(odd) and "runtime_failed" in printed(odd)


def test_an_infinite_difference_within_the_limits_is_shown(ill: dict[str, Any]) -> None:
    odd = {**ill, "comparison": {**ill["comparison"], "max_abs": "inf", "verdict": ""}}
    assert "largest difference inf" in printed(odd) and ">inf</b>" in to_html(odd)


def test_what_the_search_alone_found_is_said(ill: dict[str, Any]) -> None:
    well = {**ill["summary"], "all_on_openvino": True}
    bisection = {"kind": "wrong_answer", "explanation": "aten.relu.default is to blame"}
    shown = printed({**ill, "summary": well, "bisection": bisection, "healthy": False})
    assert "aten.relu.default is to blame" in shown and "the first compilation does not show" in shown
