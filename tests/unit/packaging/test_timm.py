"""`package --timm`: a model by its name and a weights file, served with its own pre-processing."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchserve_openvino.errors import PackagingError
from torchserve_openvino.packaging.timm_models import image_section

CASES = Path(__file__).with_name("timm_cases.py")
TESTS = CASES.parents[2]
DATA = {
    "input_size": (3, 224, 224), "interpolation": "bicubic", "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4),
    "crop_pct": 0.9, "crop_mode": "center",
}  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    place = tmp_path_factory.mktemp("timm")
    paths = [str(TESTS), str(TESTS / "unit" / "serving"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, CASES, place]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((place / "result.json").read_text())


@pytest.mark.slow
def test_a_packaged_model_answers_as_timms_own(result) -> None:
    assert result["codes"] == [0, 0], result["output"]
    assert list(result["answer"]) == list(result["expected"])
    # The template's precision is what the machine is fast in, within the bound of probabilities.
    assert result["answer"] == pytest.approx(result["expected"], abs=0.02)
    assert result["coverage"] == 1.0 and result["verified"]


@pytest.mark.slow
def test_the_archive_has_the_models_own_preprocessing(result) -> None:
    image, data = result["image"], result["timm"]
    assert image["crop"] == data["input_size"][1]
    assert image["resize"] == math.floor(data["input_size"][1] / data["crop_pct"])
    assert [image["mean"], image["std"]] == [data["mean"], data["std"]]
    assert image["interpolation"] == data["interpolation"]


def test_keys_of_a_configuration_that_is_given_win(result) -> None:
    assert result["kept"] == {**result["image"], "top_k": 2, "resize": 170}


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("damaged", "--weights"),
        ("of another model", "extra is not the model's"),
        ("unknown", "Did you mean 'test_vit"),
        ("with a handler", "exclude each other"),
    ],
)
def test_what_does_not_fit_is_refused(result, case: str, says: str) -> None:
    code, output = result["refused"][case]
    assert code in {1, 2} and says in " ".join(output.split()), output


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"input_size": (1, 28, 28)}, "takes [1, 28, 28]"),
        ({"input_size": (3, 224, 192)}, "takes [3, 224, 192]"),
        ({"crop_mode": "border"}, "cuts the center only"),
        ({"interpolation": "random"}, "image_classifier has bilinear, bicubic, nearest"),
    ],
)
def test_preprocessing_that_the_handler_lacks_is_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(PackagingError) as raised:
        image_section({**DATA, **changed}, "net")
    assert says in str(raised.value)


def test_the_preprocessing_is_translated() -> None:
    assert image_section(DATA, "net") == {
        "resize": 248, "crop": 224, "interpolation": "bicubic", "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4],
    }  # fmt: skip
