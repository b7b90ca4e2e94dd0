"""Copies of an archive that differ in their YAML."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from torchserve_openvino.config.yaml_source import openvino_section, read_yaml
from torchserve_openvino.errors import PackagingError
from torchserve_openvino.packaging.archive import extract, write
from torchserve_openvino.serving.loading.archive_manifest import model_of
from torchserve_openvino.tune.keys import KeyPath, with_changes

# Eager PyTorch answers first: what it says is the reference.
EAGER: Mapping[KeyPath, Any] = {("pt2",): {"compile": {"enable": False}}}
_RECORD: KeyPath = ("handler", "openvino", "record")


class Variants:
    """An unpacked archive, packed again with other values in its YAML.

    Args:
        archive: The .mar.
        scratch: An empty folder.

    Attributes:
        name: The model's name.
        task: Name of its handler's file: a task, for shipped handlers.
        config: Its YAML.
        text: The YAML as it is written.
        bytes: Size of its files, which are mostly weights.

    Raises:
        PackagingError: The archive cannot be read, or has no YAML.
        ConfigError: The YAML is not valid.
    """

    def __init__(self, archive: Path, scratch: Path) -> None:
        self._folder, self._store = scratch / "content", scratch / "store"
        self._folder.mkdir()
        self._store.mkdir()
        extract(archive, self._folder)
        self.bytes = sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())
        model = model_of(self._folder)
        if not model.get("configFile"):
            raise PackagingError(
                f"{archive} has no model-config.yaml to tune; package it with one: "
                "`torchserve-openvino init`, then torch-model-archiver --config-file model-config.yaml."
            )
        self.name = str(model["modelName"])
        self.task = Path(str(model.get("handler", "")).partition(":")[0]).stem
        self._config_file = self._folder / model["configFile"]
        self.text = self._config_file.read_text(encoding="utf-8")
        self.config = dict(read_yaml(self._config_file).data)

    @property
    def store(self) -> Path:
        """Folder of the variants."""
        return self._store

    def samples(self) -> list[Path]:
        """Returns the files that ``warmup.samples`` names."""
        section = openvino_section(self.config).get("warmup") or {}
        samples = section.get("samples") or []
        names = [samples] if isinstance(samples, str) else samples
        return [self._folder / Path(name).name for name in names]

    def make(self, changed: Mapping[KeyPath, Any], config_file: Path | None = None) -> Path:
        """Writes the archive with some keys changed.

        Args:
            changed: Values by key path.
            config_file: Another model-config.yaml to take instead of the archive's.

        Returns:
            Path of the .mar, in `store`.
        """
        # Comments don't matter here; `writing.py` keeps them in what the user gets.
        base = self.config if config_file is None else read_yaml(config_file).data
        config = with_changes(base, changed)
        if openvino_section(config).get("record"):
            # Requests of the tuner are not recorded, least of all into the folder that it reads.
            config = with_changes(config, {_RECORD: {}})
        self._config_file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        with tempfile.NamedTemporaryFile(dir=self._store, prefix=f"{self.name}-", suffix=".mar", delete=False) as file:
            target = Path(file.name)
        try:
            write(self._folder, target)
        finally:
            self._config_file.write_text(self.text, encoding="utf-8")
        return target
