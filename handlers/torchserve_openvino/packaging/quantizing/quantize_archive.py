"""Replaces the model of an unpacked archive by its quantized form."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchserve_openvino.errors import PackagingError
from torchserve_openvino.files.json_text import read_json_object
from torchserve_openvino.packaging.quantizing import quantizing_worker
from torchserve_openvino.serving.loading.archive_manifest import MANIFEST, QUANTIZED, QUANTIZED_MODEL
from torchserve_openvino.serving.loading.hub import hub_folder
from torchserve_openvino.tasks.catalog import TASKS

_LAST_LINES = 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


def quantize(folder: Path, beside: Path, exported: Path | None, log: Callable[[str], None]) -> dict[str, Any]:
    """Quantizes the model as `handler.openvino.quantize` says, and puts it in the place of class and weights.

    Args:
        folder: The unpacked archive.
        beside: Folder to which paths in its YAML are relative.
        exported: A model that is quantized already, as an exported program; it is compared, and takes the same place.
        log: Called with each line that tells how it goes on.

    Returns:
        What was made and compared, as `QUANTIZED` in the archive holds it.

    Raises:
        PackagingError: The model can't be quantized, or loses too much.
    """
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as scratch:
        facts = _run(folder, beside.resolve(), Path(scratch), exported, log)
        (folder / QUANTIZED_MODEL).write_bytes((Path(scratch) / QUANTIZED_MODEL).read_bytes())
    (folder / QUANTIZED).write_text(json.dumps(facts, indent=1, sort_keys=True), encoding="utf-8")
    if not facts["keeps_f32"]:
        _remove_f32(folder)
    return facts


def _remove_f32(folder: Path) -> None:
    manifest = read_json_object(folder / MANIFEST)
    model = manifest["model"]
    for key in ("modelFile", "serializedFile"):
        if name := model.pop(key, None):
            (folder / name).unlink(missing_ok=True)
    task = TASKS.get(str(model.get("handler", "")).removesuffix(".py"))
    if task is not None and task.loader:
        hub = hub_folder(folder)
        for path in [path for pattern in _WEIGHTS for path in hub.glob(pattern)]:
            path.unlink()
    else:
        model["serializedFile"] = QUANTIZED_MODEL
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _run(folder: Path, beside: Path, out: Path, exported: Path | None, log: Callable[[str], None]) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", quantizing_worker.__name__]
    command += [str(folder.resolve()), str(beside), str(out)]
    command += [str(exported.resolve())] if exported is not None else []
    last: list[str] = []
    facts: dict[str, Any] | None = None
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(quantizing_worker.RESULT):
                facts = json.loads(line.removeprefix(quantizing_worker.RESULT))
            elif line.startswith(quantizing_worker.ERROR):
                raise PackagingError(json.loads(line.removeprefix(quantizing_worker.ERROR)))
            elif line.startswith(quantizing_worker.STEP):
                log(line.removeprefix(quantizing_worker.STEP).rstrip())
            else:
                last = [*last[1 - _LAST_LINES :], line.rstrip()]
    if process.returncode or facts is None:
        output = "\n".join(last)
        raise PackagingError(f"the model could not be quantized (exit code {process.returncode}):\n{output}")
    return facts
