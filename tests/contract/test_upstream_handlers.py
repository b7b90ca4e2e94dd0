"""Runs TorchServe's own tests of handlers and envelopes on a handler with the mixin."""

import sys
from collections.abc import Iterator

import pytest
from ts.torch_handler.base_handler import BaseHandler
from ts.torch_handler.unit_tests import test_base_handler, test_envelopes
from ts.torch_handler.unit_tests.conftest import base_model_context, base_model_dir

import torchserve_openvino as tov

__all__ = ["base_model_context", "base_model_dir"]


class Ours(tov.OpenVINOHandler, BaseHandler):
    """What a user writes."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, base_model_dir: str) -> Iterator[None]:
    """Restores the variable afterwards: an upstream test turns the profiler on and leaves it on."""
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "")
    # Another test may have imported its own model.py, or left its folder in front of upstream's.
    sys.path.insert(0, str(base_model_dir))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    yield
    sys.path.remove(str(base_model_dir))
    # Nor may it find upstream's.
    sys.modules.pop("model", None)


@pytest.fixture
def handler(base_model_context):
    made = Ours()
    made.initialize(base_model_context)
    return made


@pytest.fixture
def handle_fn(handler):
    return handler.handle


for _module in (test_base_handler, test_envelopes):
    globals().update({name: value for name, value in vars(_module).items() if name.startswith("test_")})


def test_all_of_upstreams_tests_are_here() -> None:
    assert len([name for name in globals() if name.startswith("test_")]) >= 3 + 5 + 1
