"""Loads an unpacked model archive as TorchServe's worker does and prints the report: ``python -m ... FOLDER``."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from torchserve_openvino.config.yaml_source import read_yaml
from torchserve_openvino.report.quiet import quiet_libraries
from torchserve_openvino.serving.loading.archive_manifest import batch_size_of, model_of
from torchserve_openvino.serving.torchserve.calls import with_report

# Prefix of the line with the report.
RESULT = "torchserve-openvino-loaded: "


def load_handler(folder: Path) -> Any:
    """Runs an archive's handler up to READY, with TorchServe's own loader; the report is not saved.

    Args:
        folder: The unpacked archive.

    Returns:
        The handler; None where the archive's handler is a plain function.
    """
    # Imported here, so that `RESULT` can be used without TorchServe and torch.
    from ts.model_loader import ModelLoaderFactory

    from torchserve_openvino.serving.observation.load import without_saving

    model = model_of(folder)
    batch_size = 1
    if name := model.get("configFile"):
        batch_size = batch_size_of(read_yaml(folder / name))
    sys.path.insert(0, str(folder))
    handler = str(folder / model["handler"]) if (folder / model["handler"]).is_file() else model["handler"]
    loader = ModelLoaderFactory.get_model_loader()
    with without_saving():
        service = loader.load(model["modelName"], str(folder), handler, None, batch_size)
    return getattr(service._entry_point, "__self__", None)


def load_without_server(folder: Path) -> Any:
    """Runs an archive's handler up to READY, and lets it answer requests outside of any server.

    Args:
        folder: The unpacked archive.

    Returns:
        The handler; None where the archive's handler is a plain function.
    """
    # Imported here, as in `load_handler`.
    import ts
    from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

    handler = load_handler(folder)
    if handler is not None:
        metrics = Path(ts.__file__).parent / "configs" / "metrics.yaml"
        handler.context.metrics = MetricsCacheYamlImpl(config_file_path=str(metrics))
    return handler


def main(folder: str) -> None:
    """Loads an archive and prints the report of its handler.

    Args:
        folder: The unpacked archive.

    Raises:
        SystemExit: The archive's handler is not one of this package's.
    """
    quiet_libraries()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    # Imported here, as in `load_handler`.
    from torchserve_openvino.serving.torchserve.base import worker_of

    handler = load_handler(Path(folder))
    worker = worker_of(handler)
    report = with_report(handler.describe_handle(), worker.describe) if worker is not None else {}
    if not isinstance(report, dict) or "cache" not in report:
        raise SystemExit("the archive's handler is not one of torchserve-openvino's: nothing is compiled for it")
    shown = {name: report[name] for name in ("cache", "summary", "verify", "serving", "fallbacks")}
    print(RESULT + json.dumps(shown), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
