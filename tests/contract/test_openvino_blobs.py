"""Pins what the cache relies on in OpenVINO 2026.4's compiled blobs and IR."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset15 as ops

from torchserve_openvino.backend.runtime.build import cpu_level, export_blob
from torchserve_openvino.cache.identity.key import RUN_PROPERTIES

CORE = ov.Core()
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def model() -> ov.Model:
    parameter = ops.parameter([3, 4], np.float32)
    weights = ops.constant(np.arange(8, dtype=np.float32).reshape(4, 2))
    return ov.Model([ops.relu(ops.matmul(parameter, weights, False, False))], [parameter])


def blob(path: Path, **config: object) -> ov.Tensor:
    path.write_bytes(CORE.compile_model(model(), "CPU", {**F32, **config}).export_model().getbuffer())
    return ov.Tensor(np.memmap(path, dtype=np.uint8, mode="c"), shared_memory=True)


def test_a_mapped_blob_answers_as_the_model_it_was_made_of(tmp_path: Path) -> None:
    imported = CORE.import_model(blob(tmp_path / "blob"), "CPU", F32)
    np.testing.assert_array_equal(imported(X)[0], CORE.compile_model(model(), "CPU", F32)(X)[0])


@pytest.mark.parametrize(("name", "value"), [("INFERENCE_NUM_THREADS", 1), ("NUM_STREAMS", 1)])
def test_how_a_blob_is_run_is_said_at_import(tmp_path: Path, name: str, value: int) -> None:
    """Why `RUN_PROPERTIES` are not part of a blob's key."""
    assert name in RUN_PROPERTIES
    mapped = blob(tmp_path / "blob", INFERENCE_NUM_THREADS=2, NUM_STREAMS=2)
    imported = CORE.import_model(mapped, "CPU", {**F32, name: value})
    assert imported.get_property(name) == value
    np.testing.assert_allclose(imported(X)[0], CORE.compile_model(model(), "CPU", F32)(X)[0], rtol=1e-6)


def test_a_read_only_map_is_refused(tmp_path: Path) -> None:
    """Why blobs are mapped copy-on-write."""
    blob(tmp_path / "blob")
    with pytest.raises(ValueError, match="writeable"):
        ov.Tensor(np.memmap(tmp_path / "blob", dtype=np.uint8, mode="r"), shared_memory=True)


def test_weights_of_an_ir_may_be_mapped(tmp_path: Path) -> None:
    ov.save_model(model(), tmp_path / "m.xml", compress_to_fp16=False)
    weights = ov.Tensor(np.memmap(tmp_path / "m.bin", dtype=np.uint8, mode="c"), shared_memory=True)
    read = CORE.read_model((tmp_path / "m.xml").read_bytes(), weights)
    np.testing.assert_array_equal(
        CORE.compile_model(read, "CPU", F32)(X)[0], CORE.compile_model(model(), "CPU", F32)(X)[0]
    )


@pytest.mark.slow
def test_a_blob_states_its_level_and_is_refused_on_another(tmp_path: Path) -> None:
    """Why a blob for another CPU is never run, and how `--level` makes one."""
    assert cpu_level().startswith("meta=") and "isa=" in cpu_level() and "ov=2026.4" in cpu_level()
    code = (
        "import sys; from torchserve_openvino.backend.runtime.build import cpu_level, export_blob\n"
        "import openvino as ov\n"
        "sys.path.insert(0, sys.argv[1]); from test_openvino_blobs import CORE, F32, model\n"
        "open(sys.argv[2], 'wb').write(export_blob(CORE.compile_model(model(), 'CPU', F32))); print(cpu_level())"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(Path(__file__).parent), str(tmp_path / "blob")]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "SSE41"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert said.endswith("isa=Intel SSE4.1") and said != cpu_level()
    mapped = ov.Tensor(np.memmap(tmp_path / "blob", dtype=np.uint8, mode="c"), shared_memory=True)
    with pytest.raises(RuntimeError, match="isa mismatch"):
        CORE.import_model(mapped, "CPU", F32)


def test_auto_exports_nothing_or_what_it_can_import() -> None:
    found = export_blob(CORE.compile_model(model(), "AUTO:CPU"))
    assert found is None or len(found) > 0
