"""Lays out the boxes of a graph in a picture, in layers that follow the data flow."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchserve_openvino.doctor.mapping.skeletons import environment

CHARACTER = 6.6
LINE = 15
PADDING = 10
GAP_X, GAP_Y = 26, 34
MARGIN = 12
# A box that takes all the time is this many pixels wider than one that takes none.
GROWTH = 70
# Sweeps of the barycenter method (Sugiyama, Tagawa, Toda 1981); more change little.
SWEEPS = 4


@dataclass
class PlacedBox:
    """One box with its position and size, in pixels.

    Attributes:
        lines: The lines of its text.
    """

    box: Mapping[str, Any]
    lines: list[str]
    x: float
    y: float
    width: float
    height: float


@dataclass
class PictureLayout:
    """The layout of a whole graph, in pixels.

    Attributes:
        curves: One SVG path for each edge.
    """

    width: float
    height: float
    boxes: list[PlacedBox]
    curves: list[str]


def box_lines(box: Mapping[str, Any]) -> list[str]:
    """Returns the text of a box: name, number of operators, time."""
    if box["runs_on"] in {"input", "output"}:
        return [box["label"]]
    time = f"{box['ms']:.3g} ms"
    if box["ops"] > 1 or len(box["op_counts"]) > 1:
        return [box["label"], f"{box['ops']} ops, {time}"]
    (name,) = box["op_counts"] or {"": 0}
    return [box["label"], *([name] if name and name != box["label"] else []), time]


def lay_out(picture: Mapping[str, Any]) -> PictureLayout:
    """Places the boxes of one graph in layers, with few crossings.

    Args:
        picture: An entry of ``pictures`` of `Diagnosis.to_dict`.
    """
    boxes = {box["id"]: box for box in picture["boxes"]}
    edges = [(first, second) for first, second in picture["edges"] if first in boxes and second in boxes]
    rows = _ordered(_layers(boxes, edges), edges)
    placed: dict[str, PlacedBox] = {}
    y = float(MARGIN)
    for row in rows:
        x = float(MARGIN)
        for name in row:
            lines = box_lines(boxes[name])
            wide = max(map(len, lines)) * CHARACTER + 2 * PADDING + GROWTH * float(boxes[name]["share"])
            placed[name] = PlacedBox(boxes[name], lines, x, y, wide, len(lines) * LINE + PADDING)
            x += wide + GAP_X
        y += max(placed[name].height for name in row) + GAP_Y
    width = max(sum(placed[name].width + GAP_X for name in row) for row in rows) - GAP_X + 2 * MARGIN if rows else 0.0
    for row in rows:
        shift = (width - (placed[row[-1]].x + placed[row[-1]].width + MARGIN)) / 2
        for name in row:
            placed[name].x += shift
    curves = [_curve(placed[first], placed[second]) for first, second in edges]
    return PictureLayout(width, y - GAP_Y + MARGIN if rows else 0.0, list(placed.values()), curves)


def _layers(boxes: Mapping[str, Any], edges: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Puts each box in a layer below all its inputs; the boxes must come in the order of data flow."""
    above: dict[str, list[str]] = defaultdict(list)
    for first, second in edges:
        above[second].append(first)
    level: dict[str, int] = {}
    for name in boxes:
        level[name] = max((level.get(source, 0) + 1 for source in above[name]), default=0)
    rows: list[list[str]] = [[] for _ in range(max(level.values(), default=-1) + 1)]
    for name, depth in level.items():
        rows[depth].append(name)
    return rows


def _ordered(rows: list[list[str]], edges: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Sorts each row by the mean position of its neighbors, alternately those above and those below."""
    above: dict[str, list[str]] = defaultdict(list)
    below: dict[str, list[str]] = defaultdict(list)
    for first, second in edges:
        above[second].append(first)
        below[first].append(second)
    for sweep in range(SWEEPS):
        neighbors = above if sweep % 2 == 0 else below
        column = {name: i / max(1, len(row) - 1) for row in rows for i, name in enumerate(row)}
        for row in rows if sweep % 2 == 0 else reversed(rows):
            row.sort(key=lambda name: _mean([column[neighbor] for neighbor in neighbors[name]], column[name]))
            column.update((name, i / max(1, len(row) - 1)) for i, name in enumerate(row))
    return rows


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _curve(first: PlacedBox, second: PlacedBox) -> str:
    x1, y1 = first.x + first.width / 2, first.y + first.height
    x2, y2 = second.x + second.width / 2, second.y
    bend = (y2 - y1) / 2
    return f"M{x1:.1f},{y1:.1f} C{x1:.1f},{y1 + bend:.1f} {x2:.1f},{y2 - bend:.1f} {x2:.1f},{y2:.1f}"


# --- renders the graphs of a diagnosis as GraphViz text -----------------------------------------------------------


_COLORS = {"openvino": "#cfe8d5", "eager": "#f8d9b8", "inductor": "#f3e6a8"}
_OTHER = "#e4e4e4"


def to_dot(diagnosis: Mapping[str, Any]) -> str:
    """Returns the GraphViz text of all graphs, one cluster each.

    Args:
        diagnosis: Result of `Diagnosis.to_dict`.
    """
    lines = [
        f"digraph {_quoted(diagnosis['model'])} {{",
        "  rankdir=TB;",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=11];',
    ]
    for picture in diagnosis["pictures"]:
        lines.append(f"  subgraph cluster_{picture['index']} {{")
        lines.append(f"    label={_quoted(' '.join(['graph', str(picture['index']), picture['where']]))};")
        for box in picture["boxes"]:
            label = "\\n".join(_escaped(line) for line in box_lines(box))
            color = _COLORS.get(box["runs_on"], _OTHER)
            lines.append(f'    {_quoted(box["id"])} [label="{label}", fillcolor="{color}"];')
        lines += [f"    {_quoted(first)} -> {_quoted(second)};" for first, second in picture["edges"]]
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


# --- renders a diagnosis as one self-contained HTML page ----------------------------------------------------------


def to_html(diagnosis: Mapping[str, Any]) -> str:
    """Returns the HTML page.

    Args:
        diagnosis: Result of `Diagnosis.to_dict`.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    partitions = [
        {**box, "graph": picture["index"]}
        for picture in diagnosis["pictures"]
        for box in picture["boxes"]
        if box["runs_on"] not in {"input", "output"}
    ]
    return (
        environment()
        .get_template("page.html.jinja")
        .render(
            d=diagnosis,
            pictures=[(picture, lay_out(picture)) for picture in diagnosis["pictures"]],
            partitions=sorted(partitions, key=lambda box: -box["ms"]),
            slowest=max((box["ms"] for box in partitions), default=0.0) or 1.0,
            line=LINE,
            padding=PADDING,
        )
    )
