"""Classes of a module, and labels of classes, as TorchServe finds them."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.files.json_text import JsonError, read_json

LABELS = "index_to_name.json"


def own_classes(module: ModuleType) -> list[type]:
    """Returns the classes that a module defines itself, by name."""
    return [cls for _, cls in inspect.getmembers(module, inspect.isclass) if cls.__module__ == module.__name__]


def read_labels(path: Path) -> dict[str, str] | None:
    """Reads names of classes; None if there is no such file.

    Args:
        path: JSON in one of TorchServe's forms: ``{"0": "cat"}``, ``{"0": ["n02123045", "cat"]}`` or
            ``{"object_type_names": ["cat"]}``.

    Raises:
        ModelLoadError: The file holds something else.
    """
    if not path.is_file():
        return None
    try:
        content = read_json(path)
    except JsonError as error:
        raise ModelLoadError(f"{error}.") from error
    names = content.get("object_type_names") if isinstance(content, dict) else None
    if isinstance(names, list):
        content = dict(enumerate(names))
    labels = content.items() if isinstance(content, dict) else [("", None)]
    read = {}
    for key, value in labels:
        name = value[-1] if isinstance(value, list) and value else value
        if not isinstance(name, str):
            raise ModelLoadError(f"{path.name}: the entry {key!r} is neither a name nor a list that ends in one.")
        read[str(key)] = name
    return read


def labeled(
    rows: Sequence[Sequence[float]], labels: Mapping[str, str] | None, classes: Sequence[Sequence[int]]
) -> list[dict[str, float]]:
    """Returns ``{label: probability}`` for each row, in its order.

    Args:
        rows: Probabilities.
        labels: Names by number, as text; a class without one is named by its number.
        classes: The number of the class of each probability.
    """
    return [
        by_label(((labels or {}).get(str(number), str(number)), value) for number, value in zip(*pair, strict=True))
        for pair in zip(classes, rows, strict=True)
    ]


def by_label(scores: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns ``{label: score}``; where classes share a name, as in ImageNet, the first and so the best one counts.

    Args:
        scores: Labels with their scores, best first.
    """
    result: dict[str, float] = {}
    for label, score in scores:
        result.setdefault(label, score)
    return result
