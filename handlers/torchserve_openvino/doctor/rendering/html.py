"""Renders a diagnosis as one self-contained HTML page."""

from collections.abc import Mapping
from typing import Any

from torchserve_openvino.doctor.mapping.skeletons import environment
from torchserve_openvino.doctor.rendering.picture import LINE, PADDING, lay_out


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
