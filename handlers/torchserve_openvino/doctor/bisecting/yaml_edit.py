"""Writes the operators that a diagnosis found into a model-config.yaml, and leaves the rest of the file as it is."""

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchserve_openvino.config import ServingConfig, load_serving_config
from torchserve_openvino.config.op_names import normalize, packet_name
from torchserve_openvino.config.pt2 import options_path
from torchserve_openvino.config.vocabulary import OURS
from torchserve_openvino.doctor.bisecting.splice import Addition, add
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.files.atomic import AtomicFile

_NEW_COMPILE = {"compile": {"enable": True, "backend": "openvino"}}


def add_disabled_ops(path: Path, ops: Sequence[str]) -> str:
    """Adds operators to the option ``disabled_ops``.

    Args:
        path: A model-config.yaml with ``pt2`` in any form, or without.
        ops: Names in any spelling; those that are disabled already, by name or by packet, are not added.

    Returns:
        What changed, as a unified diff; empty where all operators were disabled already, or none are given.

    Raises:
        ConfigError: The file is not valid before or after the change, or names another backend; it is left unchanged.
    """
    return _add(path, lambda config: _disabled_ops(path, config, ops)) if ops else ""


def require_disabled_ops(path: Path) -> None:
    """Checks that a model-config.yaml has the option ``disabled_ops``, before minutes are spent on a search.

    Raises:
        ConfigError: The file is not valid, or names another backend.
    """
    _require_openvino(path, load_serving_config(path.resolve(), check_device=False))


def _require_openvino(path: Path, config: ServingConfig) -> None:
    if not config.pt2.is_openvino:
        raise ConfigError(
            f"uses the backend {config.pt2.backend}, which has no option disabled_ops; set the backend to {OURS[0]}.",
            location=str(path),
            key="pt2",
        )


def _disabled_ops(path: Path, config: ServingConfig, ops: Sequence[str]) -> Addition:
    _require_openvino(path, config)

    def present(content: Any, new: str) -> bool:
        known = normalize(str(content))
        return known in {new, packet_name(new)}

    form = config.pt2.form
    keys = options_path("compile" if form in {"none", "export"} else form)
    return Addition((*map(str, keys), "disabled_ops"), tuple(map(normalize, ops)), present, _NEW_COMPILE)


def _add(path: Path, addition_for: Callable[[ServingConfig], Addition]) -> str:
    """Reads, changes, checks and replaces the file."""
    # A symbolic link is kept: its target is replaced.
    target = path.resolve()
    config = load_serving_config(target, check_device=False)
    before = target.read_bytes().decode("utf-8")
    after = add(before, str(path), addition_for(config))
    if after != before:
        _replace(target, after)
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    rows = difflib.unified_diff(old, new, fromfile=str(path), tofile=str(path))
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)


def _replace(target: Path, text: str) -> None:
    """Replaces a file with a checked one, or leaves it unchanged."""
    # In the same folder, relative paths in the file still resolve while it is checked.
    with AtomicFile(target, like=target.stat(), suffix=".yaml") as draft:
        draft.file.write(text.encode("utf-8"))
        draft.file.flush()
        try:
            load_serving_config(draft.path, check_device=False)
        except ConfigError as error:
            reason = str(error).replace(str(draft.path), str(target))
            message = f"was not changed, since it would not be valid any more: {reason}"
            raise ConfigError(message, location=str(target)) from error
        draft.commit()
