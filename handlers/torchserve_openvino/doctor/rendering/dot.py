"""Renders the graphs of a diagnosis as GraphViz text."""

from collections.abc import Mapping
from typing import Any

from torchserve_openvino.doctor.rendering.picture import box_lines

_COLOURS = {"openvino": "#cfe8d5", "eager": "#f8d9b8", "inductor": "#f3e6a8"}
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
            colour = _COLOURS.get(box["runs_on"], _OTHER)
            lines.append(f'    {_quoted(box["id"])} [label="{label}", fillcolor="{colour}"];')
        lines += [f"    {_quoted(first)} -> {_quoted(second)};" for first, second in picture["edges"]]
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'
