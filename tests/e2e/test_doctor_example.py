"""The example of docs/doctor.md: doctor explains every problem, and what it prints is enough to repair the model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchserve_process import ROOT

BRANCH = """        if x.mean() > 10:
            x = x / 10
"""
# What doctor suggests for a branch on a tensor's value.
WHERE = "        x = torch.where(x.mean() > 10, x / 10, x)\n"


def doctor(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchserve_openvino.cli", "doctor", "patient.py", "--config", "patient.yaml"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def found(folder: Path, *arguments: str) -> dict[str, Any]:
    done = doctor(folder, "--json", *arguments)
    assert done.returncode in {0, 2}, done.stderr
    return {**json.loads(done.stdout), "exit_code": done.returncode}


@pytest.mark.slow
def test_the_patient_is_explained_and_mended(tmp_path: Path) -> None:
    folder = tmp_path / "doctor"
    shutil.copytree(ROOT / "scripts" / "examples" / "doctor", folder, ignore=shutil.ignore_patterns("__pycache__"))
    first = found(folder, "--bisect", "--write", "--write-mapping", "my_ops.py")
    assert first["exit_code"] == 2

    # Three operators that OpenVINO does not know, each with its line and a tested mapping.
    refused = {each["op"]: each for each in first["refused"] if each["kind"] == "unsupported_op"}
    assert refused.keys() == {f"patient.{name}.default" for name in ("swish", "soft_clip", "unit")}
    for each in refused.values():
        step = each["next_steps"][0]
        assert each["where"][0].startswith("patient.py:") and step["kind"] == "mapping" and step["proven"]
    # One graph break, with the user's line.
    (fact,) = first["graph_breaks"]
    assert fact["where"].endswith("patient.py:38") and "torch.where" in json.dumps(fact)
    # One wrong operator: the user's own mapping.
    assert first["bisection"]["disabled_ops"] == ["aten.hardtanh.default"]
    assert "your own mapping patient_ops.hardtanh" in first["bisection"]["explanation"]
    yaml = (folder / "patient.yaml").read_text()
    assert "disabled_ops: [aten.hardtanh.default]}  # no cache" in yaml

    # The generated mappings pass their generated tests.
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_ops.py"]
    done = subprocess.run(tests, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout

    # Repaired as suggested: correct, and all but the disabled operator run on OpenVINO.
    model = folder / "patient.py"
    assert BRANCH in model.read_text()
    model.write_text(model.read_text().replace(BRANCH, WHERE))
    (folder / "patient.yaml").write_text(yaml.replace("[patient_ops.py]", "[patient_ops.py, my_ops.py]"))
    second = found(folder)
    assert second["comparison"]["verdict"] == "" and not second["graph_breaks"]
    assert [(each["kind"], each["op"]) for each in second["fallbacks"]] == [("disabled_op", "aten.hardtanh.default")]

    # Without the wrong mapping nothing needs to be disabled.
    healed = yaml.replace("[patient_ops.py]", "[my_ops.py]").replace(", disabled_ops: [aten.hardtanh.default]", "")
    (folder / "patient.yaml").write_text(healed)
    last = found(folder)
    assert last["exit_code"] == 0 and last["healthy"] and last["summary"]["coverage"] == 1.0
