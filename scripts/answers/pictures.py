"""Draws answers over the photo that was asked about: boxes, the class of each pixel, depth.

What an answer is, its form says: see docs/tasks.md for those of object_detector, image_segmenter and depth_estimator.
"""

from __future__ import annotations

import base64
import colorsys
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

# A smaller photo is enlarged, so that letters fit.
_LEAST = 480
# Most classes in a legend; the rest is drawn without a name.
_MOST_NAMES = 20
# Share of the class's color in an overlay.
_OPACITY = 0.55
# Dark, middle and bright end of the scale of depth, which also differ in grey.
_SCALE = ("#0d0887", "#cc4778", "#f0f921")

Rows = list[dict[str, Any]]


def drawn(answer: Any, photo: Image.Image) -> tuple[Image.Image, Rows] | None:
    """Draws an answer.

    Args:
        answer: The answer, parsed from JSON.
        photo: The picture that was sent.

    Returns:
        The picture, and the rows of a table that says the same; None if the answer is nothing to draw.
    """
    # The server turns photos upright, too.
    photo = (ImageOps.exif_transpose(photo) or photo).convert("RGB")
    if _is_detection(answer):
        return _boxes(answer, photo)
    if isinstance(answer, dict) and answer.keys() >= {"label_map", "labels"}:
        return _overlay(np.array(_opened(answer["label_map"])), answer["labels"], photo)
    if isinstance(answer, dict) and answer.keys() >= {"depth", "min", "max"}:
        return _depth(answer), [{"min": answer["min"], "max": answer["max"]}]
    if _is_segmentation(answer):
        return _overlay(np.array([[pixel[0] for pixel in row] for row in answer]).astype(int), {}, photo)
    return None


def _is_detection(answer: Any) -> bool:
    return isinstance(answer, list) and bool(answer) and all(
        isinstance(item, dict) and "score" in item and _box(item) is not None for item in answer
    )  # fmt: skip


def _box(detection: Mapping[str, Any]) -> tuple[str, list[float]] | None:
    """Returns the label and the box of one object; the key of the box is the label."""
    for name, value in detection.items():
        if isinstance(value, list) and len(value) == 4:
            return name, value
    return None


def _is_segmentation(answer: Any) -> bool:
    """Whether an answer is rows of pixels ``[class, probability]``; the first row stands for all."""
    try:
        return np.asarray(answer[0], dtype=float).shape[1:] == (2,) and isinstance(answer[0], list)
    except (TypeError, ValueError, IndexError, KeyError):
        return False


def _opened(png: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(png)))


def _enlarged(photo: Image.Image) -> tuple[Image.Image, float]:
    factor = max(1.0, _LEAST / max(photo.size))
    return (photo, 1.0) if factor == 1.0 else (photo.resize([round(side * factor) for side in photo.size]), factor)


def _color(number: int) -> tuple[int, int, int]:
    """Returns a color that differs from those of the numbers around it."""
    # Steps of the golden ratio spread hues evenly, however many there are.
    hue = (number * 0.618034 + 0.02) % 1.0
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.9, (1.0, 0.75)[number % 2])
    return round(red * 255), round(green * 255), round(blue * 255)


def _ink(color: tuple[int, int, int]) -> str:
    """Returns black or white, whichever can be read on a color."""
    return "black" if 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] > 140 else "white"


def _font(picture: Image.Image) -> Any:
    return ImageFont.load_default(max(13, max(picture.size) // 55))


def _boxes(answer: Rows, photo: Image.Image) -> tuple[Image.Image, Rows]:
    picture, factor = _enlarged(photo)
    picture = picture.copy()
    draw, font = ImageDraw.Draw(picture), _font(picture)
    named = [(*(_box(item) or ("", [])), float(item["score"])) for item in answer]
    colors = {name: _color(i) for i, name in enumerate(dict.fromkeys(name for name, _, _ in named))}
    width = max(2, max(picture.size) // 300)
    # The surest last, on top of the others; labels on top of all boxes.
    upwards = sorted(named, key=lambda entry: entry[2])
    for name, box, _ in upwards:
        left, top, right, bottom = (side * factor for side in box)
        draw.rectangle((left, top, max(left, right), max(top, bottom)), outline=colors[name], width=width)
    for name, box, score in upwards:
        text = f"{name} {score:.2f}"
        _, _, wide, high = draw.textbbox((0, 0), text, font=font)
        # Above the box, or inside where there is no room, and never beyond the picture.
        x = min(max(0.0, box[0] * factor), max(0.0, picture.width - wide - 6))
        y = box[1] * factor - high - 5
        y = min(y if y >= 0 else max(0.0, box[1] * factor), max(0.0, picture.height - high - 5))
        draw.rectangle((x, y, x + wide + 6, y + high + 5), fill=colors[name])
        draw.text((x + 3, y + 2), text, font=font, fill=_ink(colors[name]))
    return picture, [
        {"label": name, "score": score, **dict(zip(("x1", "y1", "x2", "y2"), map(_round, box), strict=True))}
        for name, box, score in named
    ]


def _round(number: float) -> str:
    return f"{number:.1f}"


def _overlay(classes: Any, names: Mapping[str, str], photo: Image.Image) -> tuple[Image.Image, Rows]:
    """Colors each pixel by its class.

    Args:
        classes: Integers ``[height, width]``, in any size.
        names: Names of classes by their number as text.
        photo: The picture below.
    """
    picture, _ = _enlarged(photo)
    numbers, counts = np.unique(classes, return_counts=True)
    palette = np.array([_color(int(number)) for number in numbers], dtype=np.uint8)
    colors = Image.fromarray(palette[np.searchsorted(numbers, classes)])
    colors = colors.resize(picture.size, Image.Resampling.NEAREST)
    rows = [
        {"class": int(number), "label": names.get(str(number), ""), "share": f"{count / classes.size:.1%}"}
        for number, count in sorted(zip(numbers, counts, strict=True), key=lambda pair: -pair[1])
    ]
    blended = Image.blend(picture, colors, _OPACITY)
    legend = [(_color(row["class"]), f"{row['label'] or row['class']}  {row['share']}") for row in rows]
    return _beside(blended, legend), rows


def _beside(picture: Image.Image, legend: list[tuple[tuple[int, int, int], str]]) -> Image.Image:
    """Returns a picture with a legend at its right."""
    font = _font(picture)
    more = len(legend) - _MOST_NAMES
    entries: list[tuple[tuple[int, int, int], str]] = legend[:_MOST_NAMES]
    entries += [((255, 255, 255), f"and {more} more")] if more > 0 else []
    line = round(font.size * 1.6)
    wide = max(round(font.getlength(text)) for _, text in entries) + line + 24
    canvas = Image.new("RGB", (picture.width + wide, max(picture.height, line * len(entries) + 16)), "white")
    canvas.paste(picture, (0, 0))
    draw = ImageDraw.Draw(canvas)
    for row, (color, text) in enumerate(entries):
        x, y = picture.width + 10, 8 + row * line
        draw.rectangle((x, y, x + line - 6, y + line - 6), fill=color)
        draw.text((x + line + 2, y + (line - 6) // 2), text, font=font, fill="black", anchor="lm")
    return canvas


def _depth(answer: Mapping[str, Any]) -> Image.Image:
    """Returns the depth in colors, above a scale with its least and its greatest number."""
    grey, _ = _enlarged(_opened(answer["depth"]).convert("L"))
    font = _font(grey)
    high = round(font.size * 1.8)
    canvas = Image.new("RGB", (grey.width, grey.height + high), "white")
    canvas.paste(_colored(grey), (0, 0))
    least, most = (f"{answer[name]:.4g}" for name in ("min", "max"))
    start, end = round(font.getlength(least)) + 12, grey.width - round(font.getlength(most)) - 12
    ramp = Image.linear_gradient("L").rotate(90).resize((max(1, end - start), max(1, high - 10)))
    canvas.paste(_colored(ramp), (start, grey.height + 5))
    draw = ImageDraw.Draw(canvas)
    draw.text((6, grey.height + high // 2), least, font=font, fill="black", anchor="lm")
    draw.text((grey.width - 6, grey.height + high // 2), most, font=font, fill="black", anchor="rm")
    return canvas


def _colored(grey: Image.Image) -> Image.Image:
    dark, middle, bright = _SCALE
    return ImageOps.colorize(grey, dark, bright, mid=middle)
