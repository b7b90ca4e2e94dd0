"""Builds a wheel of this package from its installed files, for archives that run where it is not installed."""

import base64
import hashlib
import zipfile
from importlib import metadata
from pathlib import Path

from torchserve_openvino.packaging.archive import EPOCH
from torchserve_openvino.packaging.starter import template_folder

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
