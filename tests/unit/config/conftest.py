"""Fake devices, for test machines that have only a CPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torchserve_openvino.config.openvino.devices import SystemCatalog


class FakeCatalog:
    """Lists the given devices; only the CPU and the virtual devices can be queried."""

    def __init__(self, *devices: str) -> None:
        self._devices = devices
        self._system = SystemCatalog()

    def available(self) -> tuple[str, ...]:
        return self._devices

    def properties(self, device: str) -> Mapping[str, str] | None:
        return self._system.properties(device) if device in {"CPU", "AUTO", "HETERO", "MULTI"} else None

    def refusal(self, device: str, name: str, value: Any) -> str | None:
        return self._system.refusal(device, name, value)


@pytest.fixture
def many_devices() -> FakeCatalog:
    return FakeCatalog("CPU", "GPU.0", "GPU.1", "NPU")


@pytest.fixture
def one_gpu() -> FakeCatalog:
    return FakeCatalog("CPU", "GPU")


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str) -> Path:
        path = tmp_path / "model-config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write
