"""A real TorchServe for tests: scripts/lib/server.py with the model API enabled, and archives built here."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "scripts", ROOT / "scripts" / "lib"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from server import TorchServeError, TorchServeProcess  # noqa: E402

from build_efficientnet_mar import handler_path, program, run_archiver  # noqa: E402

__all__ = [
    "ROOT",
    "TorchServeError",
    "TorchServeProcess",
    "archive",
    "handler_path",
    "load",
    "loaded",
    "metric",
    "torchserve",
]


@contextmanager
def torchserve(
    model_store: Path | None = None, properties: Mapping[str, str] | None = None, patched: bool = False
) -> Iterator[TorchServeProcess]:
    """Starts a separate TorchServe on free ports; stops it with its workers at the end.

    Prints the end of the logs when the block fails.
    """
    with tempfile.TemporaryDirectory(prefix="tsov-store-") as own_store:
        everything = {"enable_model_api": "true", **(properties or {})}
        server = TorchServeProcess(model_store or Path(own_store), properties=everything, patched=patched)
        try:
            server.start()
            server.wait_healthy()
            yield server
        except BaseException:
            print(server.log_tail(), file=sys.stderr)
            raise
        finally:
            server.stop()


def archive(
    server: TorchServeProcess,
    name: str,
    *,
    handler: str | Path,
    config: str,
    model_file: str | Path | None = None,
    serialized_file: Path | None = None,
    extra_files: Sequence[Path] = (),
) -> str:
    """Packs a model into the server's store with the real torch-model-archiver; returns the file's name.

    Args:
        server: The server whose model store gets the archive.
        name: The archive's name, without `.mar`.
        handler: A handler file, or its source.
        config: The text of model-config.yaml.
        model_file: A file with the model's class, or its source.
        serialized_file: Weights, or a whole exported model.
        extra_files: Further files.
    """
    with tempfile.TemporaryDirectory(prefix="tsov-mar-") as folder:
        sources = Path(folder)
        config_file = sources / "model-config.yaml"
        config_file.write_text(config)
        command = [program("torch-model-archiver"), "--force", "--model-name", name, "--version", "1.0"]
        command += ["--handler", str(as_file(handler, sources / f"{name}_handler.py"))]
        command += ["--config-file", str(config_file), "--export-path", str(server.model_store)]
        if model_file is not None:
            command += ["--model-file", str(as_file(model_file, sources / f"{name}_model.py"))]
        if serialized_file is not None:
            command += ["--serialized-file", str(serialized_file)]
        if extra_files:
            command += ["--extra-files", ",".join(str(path) for path in extra_files)]
        run_archiver(command)
    return f"{name}.mar"


def as_file(source: str | Path, place: Path) -> Path:
    """Returns the file itself, or `place` after writing the source to it."""
    if "\n" not in str(source):
        return Path(source)
    place.write_text(source)
    return place


def load(server: TorchServeProcess, name: str, **archive_arguments: object) -> None:
    """Packs, registers, and waits until the worker is READY.

    Raises:
        TorchServeError: The worker did not load; the message carries the end of its log.
    """
    packed = archive(server, name, **archive_arguments)  # type: ignore[arg-type]
    answer = server.register(packed, name)
    if answer.status_code != 200:
        raise TorchServeError(f"{answer.text}\n{server.log_tail(200)}")
    server.wait_ready(name)


@contextmanager
def loaded(server: TorchServeProcess, name: str, **archive_arguments: object) -> Iterator[str]:
    """Loads a model, and unregisters it at the end: each worker takes half a gigabyte."""
    load(server, name, **archive_arguments)
    try:
        yield name
    finally:
        server.http.delete(f"{server.management_url}/models/{name}")


def metric(server: TorchServeProcess, name: str, model: str) -> float | None:
    """The sum over all other dimensions: a counter exists for each kind, at 0 if nothing happened; None if absent."""
    text = server.http.get(server.metrics_url).text
    found = re.findall(rf'^{name}{{[^}}]*ModelName="{re.escape(model)}"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found)) if found else None
