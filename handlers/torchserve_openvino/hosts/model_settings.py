"""What hosts read of an archive without loading it: its name, and how its model is served."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchserve_openvino.config.fields import seconds_of
from torchserve_openvino.config.torchserve_keys import check_torchserve_keys
from torchserve_openvino.config.yaml_source import Source, openvino_section
from torchserve_openvino.errors import ConfigError, PackagingError
from torchserve_openvino.packaging.archive import read_packed_config
from torchserve_openvino.serving.loading.archive_manifest import MANIFEST

LOG_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
# TorchServe's defaults.
DELAY_MS, TIMEOUT_SECONDS, _STARTUP_SECONDS, _QUEUE_SIZE = 100, 120, 120, 100


@dataclass(frozen=True)
class ModelSettings:
    """How one model is served.

    Attributes:
        name: Its name.
        version: Its version.
        batch_size: Most requests in one call.
        delay: Seconds that a request waits for others.
        timeout: Seconds in which a request has to be answered.
        startup: Seconds in which a worker has to load the model.
        queue_size: Most requests that wait.
        workers: ``minWorkers``.
        keep: Seconds without a request after which its workers end; None keeps them.
        awaits: Whether requests join each other in the model's own engine, so that each is a call of its own.
    """

    name: str
    version: str
    batch_size: int
    delay: float
    timeout: float
    startup: float
    queue_size: int
    workers: int
    keep: float | None
    awaits: bool = False

    @staticmethod
    def of(archive: Path) -> "ModelSettings":
        """Reads an archive.

        Raises:
            PackagingError: The file is no archive.
            ConfigError: Its YAML is not valid.
        """
        if not archive.is_file():
            raise PackagingError(f"{archive} is not a file. Name the path of a .mar.")
        model, source = read_packed_config(archive)
        return ModelSettings.read(archive, model, source)

    @staticmethod
    def read(archive: Path, model: Mapping[str, Any], source: Source) -> "ModelSettings":
        """Reads what an archive holds.

        Args:
            archive: The archive, for messages.
            model: The section ``model`` of its manifest.
            source: Its model-config.yaml.

        Raises:
            PackagingError: The manifest names no model.
            ConfigError: The YAML is not valid.
        """
        if not model.get("modelName"):
            raise PackagingError(f"{archive}: {MANIFEST} names no model.")
        problems = source.problems()
        keys: dict[str, Any] = check_torchserve_keys(source.data, problems)
        problems.raise_if_any(source.name)
        return ModelSettings(
            name=str(model["modelName"]),
            version=str(model.get("modelVersion") or "1.0"),
            batch_size=int(keys.get("batchSize", 1)),
            delay=float(keys.get("maxBatchDelay", DELAY_MS)) / 1e3,
            timeout=float(keys.get("responseTimeout", TIMEOUT_SECONDS)),
            startup=float(keys.get("startupTimeout", _STARTUP_SECONDS)),
            queue_size=int(keys.get("jobQueueSize", _QUEUE_SIZE)),
            workers=int(keys.get("minWorkers", 1)),
            keep=_keep(source.data, source.name),
            awaits=bool(source.data.get("asyncCommunication")),
        )


def _keep(data: Mapping[Any, Any], name: str) -> float | None:
    value = openvino_section(data).get("keep")
    if value is None:
        return None
    try:
        return seconds_of(value)
    except ValueError as error:
        raise ConfigError(str(error), key="handler.openvino.keep", location=name) from error
