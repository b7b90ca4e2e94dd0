"""OpenVINO's options, through `tov.compile`, on the real device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import check
from torchserve_openvino.backend.runtime import build
from torchserve_openvino.errors import ConfigError, DeviceNotFoundError, UnknownOperatorError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


@pytest.mark.parametrize("device", ["CPU", "cpu", "AUTO", "AUTO:CPU", "HETERO:CPU", "MULTI:CPU"])
def test_devices(device: str) -> None:
    compiled = check(net(), torch.randn(4, 6), options={"device": device})
    assert compiled.report.summary.device.startswith(device.upper().split(":", maxsplit=1)[0])
    assert compiled.report.summary.precision in {"f32", "FP32"}, compiled.report.to_dict()["config"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "GPU.7"}, DeviceNotFoundError, "CPU"),
        ({"devcie": "CPU"}, ConfigError, "device"),
        ({"disabled_ops": ["aten.rleu"]}, UnknownOperatorError, "aten.relu"),
        ({"config": {"INFERENCE_PRECISION_HNT": "f32"}}, ConfigError, "INFERENCE_PRECISION_HINT"),
        ({"model_caching": "maybe"}, ConfigError, "model_caching"),
    ],
)
def test_bad_options_are_refused_before_anything_compiles(options, error, message) -> None:
    with pytest.raises(error, match=message):
        tov.compile(net(), options=options)


@pytest.mark.parametrize("stated", [None, True])
def test_auto_answers_on_the_device_that_was_verified(monkeypatch: pytest.MonkeyPatch, stated: bool | None) -> None:
    # By default, AUTO answers on the CPU until its first choice is ready.
    asked = []

    class Core:
        def compile_model(self, model, device, properties):
            asked.append(properties["ENABLE_STARTUP_FALLBACK"])
            return real.compile_model(model, device, properties)

        def __getattr__(self, name: str):
            return getattr(real, name)

    real = build.core()
    monkeypatch.setattr(build, "core", Core)
    config = {} if stated is None else {"ENABLE_STARTUP_FALLBACK": stated}
    check(net(), torch.randn(4, 6), options={"device": "AUTO", "config": config})
    assert asked == [bool(stated)]


def test_hints_reach_the_device() -> None:
    options = {"config": {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}}
    compiled = check(net(), torch.randn(4, 6), options=options)
    assert compiled.report.to_dict()["config"]["ov_config"]["PERFORMANCE_HINT"] == "THROUGHPUT"


def test_environment_gives_defaults_and_options_win(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENVINO_TORCH_BACKEND_DEVICE", "AUTO:CPU")
    monkeypatch.setenv("OPENVINO_TORCH_MODEL_CACHING", "true")
    monkeypatch.setenv("OPENVINO_TORCH_CACHE_DIR", str(tmp_path))
    compiled = check(net(), torch.randn(4, 6))
    options = compiled.report.to_dict()["config"]["options"]
    assert options["device"] == {"value": "AUTO:CPU", "source": "env OPENVINO_TORCH_BACKEND_DEVICE"}
    assert compiled.report.to_dict()["cache"]["directory"] == str(tmp_path) and list(tmp_path.iterdir())
    compiled = check(net(), torch.randn(4, 6), options={"device": "CPU", "model_caching": False})
    assert compiled.report.to_dict()["config"]["options"]["device"]["value"] == "CPU"
    assert compiled.report.to_dict()["cache"]["status"] == "off"


@pytest.mark.parametrize(("name", "backend", "said"), [
    ("aten.linear", "openvino", True),
    ("aten::layer_norm", "openvino_ts", True),
    ("aten.embedding_bag.default", "openvino", True),
    ("aten.linear", "export", False),
    ("aten.addmm", "openvino", False),
    ("aten.native_layer_norm", "openvino", False),
])  # fmt: skip
def test_a_disabled_operator_that_no_graph_will_hold_is_named(name: str, backend: str, said: bool, caplog) -> None:
    compiled = tov.compile(net(), backend=backend, options={"disabled_ops": [name]})
    with torch.no_grad():
        compiled(torch.randn(2, 6))
    assert said == any("has no effect" in r.message and name.replace("::", ".") in r.message for r in caplog.records)


PROCESS = """
import sys, torch, torchserve_openvino as tov
from torch import nn
torch.manual_seed(int(sys.argv[2]))
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
compiled = tov.compile(model, options={"model_caching": True, "cache_dir": sys.argv[1]})
x = torch.randn(4, 6)
with torch.no_grad():
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
report = compiled.report.to_dict()
assert report["summary"]["coverage"] == 1.0 and not report["fallbacks"]
print(report["cache"]["hits"], report["cache"]["misses"])
"""


@pytest.mark.slow
def test_a_second_process_takes_the_compiled_blob_and_other_weights_do_not(tmp_path: Path) -> None:
    def process(seed: int) -> str:
        command = [sys.executable, "-c", PROCESS, str(tmp_path), str(seed)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert process(0) == "0 1"
    assert process(0) == "1 0"
    assert process(1) == "0 1"
