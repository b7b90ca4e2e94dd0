from pathlib import Path

import pytest
from ill_models import ILL, written

from helpers import hypot_refused
from torchserve_openvino.doctor.diagnose import diagnose
from torchserve_openvino.doctor.diagnosis import Diagnosis
from torchserve_openvino.doctor.target import TargetSpec, load_target


@pytest.fixture(scope="session")
def ill_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ill")


@pytest.fixture(scope="session")
def ill(ill_folder: Path) -> Diagnosis:
    with hypot_refused():
        return diagnose(load_target(TargetSpec(written(ill_folder, "ill_steps.py", ILL))))
