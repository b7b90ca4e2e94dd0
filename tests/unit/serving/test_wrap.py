"""`handler.openvino.wrap`: a user's own handler file, served on OpenVINO by the YAML alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from own_handlers import NET, X, weights

import torchserve_openvino as tov
from encoder import build
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tasks.tensor import TensorHandler

OWN = """
import torch
from ts.torch_handler.base_handler import BaseHandler

class Theirs(BaseHandler):
    def preprocess(self, data):
        rows = [row.get("data") or row.get("body") for row in data]
        return torch.tensor([[float(v) for v in row.decode().split(",")] for row in rows])

    def postprocess(self, data):
        return [{"best": int(row.argmax()), "scores": row.tolist()} for row in data]
"""
# Not a BaseHandler, as some of TorchServe's examples.
FREE = """
import torch
from ts.utils.util import list_classes_from_module

class Theirs:
    def __init__(self):
        self.model, self.seen = None, 0

    def initialize(self, context):
        import importlib
        module = importlib.import_module(context.manifest["model"]["modelFile"][:-3])
        self.model = list_classes_from_module(module)[0]()
        folder = context.system_properties["model_dir"]
        self.model.load_state_dict(torch.load(folder + "/weights.pth"))
        self.model.eval()

    def preprocess(self, data):
        return torch.tensor([[float(v) for v in row["body"].decode().split(",")] for row in data])

    def handle(self, data, context):
        self.seen += len(data)
        with torch.no_grad():
            found = self.model(self.preprocess(data))
        return [{"best": int(row.argmax()), "scores": row.tolist()} for row in found]
"""
TEXT = ",".join(map(str, X.tolist())).encode()


def settings(name: str = "own_steps.py", **more: Any) -> dict[str, Any]:
    return {"handler": {"openvino": {"wrap": name, "warmup": {"inputs": [{"shape": [4]}]}, **more}}}


def started(archive: Any, source: str | None, config: dict[str, Any], name: str) -> tuple[Any, TensorHandler]:
    made = archive(config, model_file=NET, weights=weights, batch_size=2)
    if source is not None:
        (Path(made.context.system_properties["model_dir"]) / name).write_text(source)
    handler = TensorHandler()
    handle = handler.handle
    handler.initialize(made.context)
    # TorchServe took this before the model was loaded.
    assert handle.__self__ is handler
    return made, handler


@pytest.mark.parametrize(("source", "name"), [(OWN, "own_steps.py"), (FREE, "free_steps.py")], ids=["base", "free"])
def test_their_steps_run_with_the_model_on_openvino(archive, source, name) -> None:
    made, handler = started(archive, source, settings(name), name)
    with torch.no_grad():
        expected = build(NET, "Network")(X.unsqueeze(0))[0]
    answers = made.handle(handler, TEXT, TEXT)
    for answer in answers:
        assert answer["best"] == int(expected.argmax())
        torch.testing.assert_close(torch.tensor(answer["scores"]), expected, rtol=1e-4, atol=1e-5)
    report = handler.describe_handle()
    assert report["summary"]["coverage"] == 1.0 and report["verify"]["passed"]
    assert report["serving"]["compiles_after_ready"] == 0 and not report["fallbacks"]
    assert type(handler).__name__ == "OpenVINOTheirs"
    # Methods such as `generate` are compiled for it as for a handler that derives from `OpenVINOHandler`.
    assert isinstance(handler, tov.OpenVINOHandler) and issubclass(TensorHandler, tov.OpenVINOHandler)
    assert worker_of(handler).method_compilers == tov.OpenVINOHandler._openvino_method_compilers != ()


def test_a_bad_item_fails_alone(archive) -> None:
    made, handler = started(archive, OWN, settings(), "own_steps.py")
    good, bad = made.handle(handler, TEXT, b"x,y")
    assert "best" in good and made.status(1) == 500 and "could not convert" in bad["message"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "not in the archive"),
        ("x = 1", "exactly one class of its own; found none"),
        ("class A:\n    pass\nclass B:\n    pass", "found A, B"),
        ("class A:\n    pass", "no method initialize"),
        ("import nothing_like_this\nclass A:\n    pass", "cannot be imported"),
        ("from torchserve_openvino.tasks.tensor import TensorHandler\nclass A(TensorHandler):\n    pass", "already"),
    ],
    ids=["missing", "none", "two", "no handler", "import", "ours"],
)
def test_a_file_that_is_no_handler_is_refused(archive, source, message) -> None:
    name = f"wrapped_{abs(hash(message))}.py"
    with pytest.raises(ModelLoadError, match=message):
        started(archive, source, settings(name), name)


@pytest.mark.parametrize("name", ["../x.py", "x", "a b.py", 3])
def test_the_key_takes_a_python_file(archive, name) -> None:
    with pytest.raises(ModelLoadError, match=r"wrap: must name a Python file"):
        started(archive, None, settings(name), "x.py")
