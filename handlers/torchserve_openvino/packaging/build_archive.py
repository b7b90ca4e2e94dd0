"""Makes a .mar step by step: torch-model-archiver, the model's folder, checks, quantizing, compiled graphs."""

import base64
import glob
import hashlib
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from torchserve_openvino.config.yaml_source import read_yaml
from torchserve_openvino.errors import PackagingError
from torchserve_openvino.packaging import archive, hub_model
from torchserve_openvino.packaging.archive import EPOCH
from torchserve_openvino.packaging.check_archive import check_folder
from torchserve_openvino.packaging.hub_model import HubModel
from torchserve_openvino.packaging.precompile import check_levels, precompile
from torchserve_openvino.packaging.quantizing.quantize_archive import quantize
from torchserve_openvino.packaging.starter import template_folder
from torchserve_openvino.serving.loading.archive_manifest import model_of


@dataclass(frozen=True)
class Quantizing:
    """What a command line says of `handler.openvino.quantize`.

    Attributes:
        method: Instead of the YAML's.
        calibration: Instead of the YAML's ``calibration.data``.
        made: A model that is quantized already.
        beside: Folder to which paths in the YAML are relative.
    """

    method: str | None = None
    calibration: Path | None = None
    made: Path | None = None
    beside: Path = Path()

    def write(self, folder: Path) -> None:
        """Puts it into the YAML of an unpacked archive.

        Raises:
            PackagingError: The archive has no YAML.
        """
        if self.method is None and self.calibration is None:
            return
        name = model_of(folder).get("configFile")
        if name is None:
            raise PackagingError("--quantize needs a --config-file.")
        document = dict(read_yaml(folder / name).data)
        section: Any = document
        for key in ("handler", "openvino", "quantize"):
            # Nothing behind a key is an empty section.
            section[key] = {} if section.get(key) is None else section[key]
            section = section[key]
            if not isinstance(section, dict):
                # The check of the YAML says so.
                return
        if self.method is not None:
            section["method"] = self.method
        if self.calibration is not None:
            calibration = {} if section.get("calibration") is None else section["calibration"]
            if not isinstance(calibration, dict):
                return
            section["calibration"] = {**calibration, "data": str(self.calibration.resolve())}
        (folder / name).write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


@dataclass(frozen=True)
class Recipe:
    """What goes into an archive.

    Attributes:
        name: The model's name.
        arguments: Options for torch-model-archiver, without name, extra files and requirements.
        extra: Further files.
        requirements: pip requirements.
        bundles: Whether this package's wheel is added.
        precompiles: Whether the compiled graphs are added.
        levels: CPU levels for which they are compiled, besides this machine's.
        pretrained: The Hugging Face model, if it is one.
        quantizing: Of the model.
    """

    name: str
    arguments: Sequence[str]
    extra: Sequence[Path] = ()
    requirements: Path | None = None
    bundles: bool = False
    precompiles: bool = False
    levels: Sequence[str] = ()
    pretrained: HubModel | None = None
    quantizing: Quantizing = field(default_factory=Quantizing)


def make(recipe: Recipe, target: Path, step: Callable[[str], None]) -> dict[str, Any]:
    """Makes an archive.

    Args:
        recipe: What goes into it.
        target: Where it is written.
        step: Called with what is done next.

    Returns:
        JSON-safe: ``archive``, ``bytes``, ``precompiled``, ``quantized``; with a Hugging Face model also ``task`` and
        ``task_from``.

    Raises:
        PackagingError: Something can't be packaged.
    """
    check_levels(recipe.levels)
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as scratch:
        work, folder = Path(scratch) / "work", Path(scratch) / "archive"
        work.mkdir()
        folder.mkdir()
        arguments = [*recipe.arguments, *_files(recipe, work)]
        if recipe.pretrained is not None:
            step("loading the model")
            hub_model.check_loads(recipe.pretrained)
        step("torch-model-archiver")
        archive.extract(archive.run_archiver(arguments, recipe.name, work), folder)
        if recipe.pretrained is not None:
            hub_model.put_into(folder, recipe.pretrained)
        recipe.quantizing.write(folder)
        # The archive may be served by another machine, which has the device.
        checked = check_folder(folder, check_device=False)
        if checked.problems:
            raise PackagingError("a worker would not serve it: " + "; ".join(checked.problems))
        quantized = None
        if checked.config.openvino.quantize.method is not None:
            quantized = quantize(folder, recipe.quantizing.beside, recipe.quantizing.made, step)
        elif recipe.quantizing.made is not None:
            raise PackagingError("--from needs --quantize, or handler.openvino.quantize.method.")
        elif recipe.quantizing.calibration is not None:
            raise PackagingError("--calibration needs --quantize, or handler.openvino.quantize.method.")
        done = precompile(folder, list(recipe.levels), step) if recipe.precompiles else []
        step("writing the archive")
        archive.write(folder, target)
    summaries = [step.summary for step in done]
    facts = {"archive": str(target), "bytes": target.stat().st_size, "precompiled": summaries, "quantized": quantized}
    if recipe.pretrained is None:
        return facts
    return {**facts, "task": recipe.pretrained.task.handler, "task_from": recipe.pretrained.why}


def _files(recipe: Recipe, work: Path) -> list[str]:
    """Returns the archiver's options for extra files and requirements, the package's wheel among them if it is asked
    for."""
    extra, requirements = list(recipe.extra), recipe.requirements
    if recipe.bundles:
        wheel = build_wheel(work)
        lines = requirements.read_text(encoding="utf-8").rstrip() + "\n" if requirements is not None else ""
        requirements = work / "requirements.txt"
        requirements.write_text(f"{lines}./{wheel.name}\n", encoding="utf-8")
        extra.append(wheel)
    for path in extra:
        if "," in str(path):
            raise PackagingError(f"{path}: torch-model-archiver takes a comma for the end of a file; rename it.")
    # The archiver takes them as patterns.
    options = ["--extra-files", ",".join(glob.escape(str(path)) for path in extra)] if extra else []
    return options + (["--requirements-file", str(requirements)] if requirements is not None else [])


# --- builds a wheel of this package from its installed files, for archives that run where it is not installed -----


PACKAGE = "torchserve-openvino"
_WHEEL = "Wheel-Version: 1.0\nGenerator: torchserve-openvino\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_wheel(folder: Path) -> Path:
    """Writes the wheel; the same files give the same bytes.

    Args:
        folder: Target folder.
    """
    distribution = metadata.distribution(PACKAGE)
    name = PACKAGE.replace("-", "_")
    info = f"{name}-{distribution.version}.dist-info"
    root = Path(__file__).resolve().parents[1]
    content = {
        f"{name}/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    ready = sorted(template_folder().iterdir())
    content |= {f"{name}/templates/{path.name}": path.read_bytes() for path in ready}
    # setuptools calls it PKG-INFO where the package is used from its sources.
    described = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
    stated = {"METADATA": described, "entry_points.txt": distribution.read_text("entry_points.txt")}
    content |= {f"{info}/{file}": (text or "").encode() for file, text in stated.items()}
    content[f"{info}/WHEEL"] = _WHEEL.encode()
    record = f"{info}/RECORD"
    lines = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in content.items()]
    content[record] = ("\n".join([*lines, f"{record},,"]) + "\n").encode()
    target = folder / f"{name}-{distribution.version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return target


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
