"""Handlers of the forms in which TorchServe's examples use their models, by `handler.openvino.wrap` alone."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from own_handlers import report_of
from serving_worker import labels

from encoder import build
from hub_handler import TRANSFORMERS
from hub_models import VOCABULARY, minilm, save, text_model
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tasks.tensor import TensorHandler

TASKS = {
    "sequence_classification": "text_classifier",
    "token_classification": "token_classifier",
    "question_answering": "question_answerer",
    "text_generation": "",
}
REQUESTS = b"The new virus changed the world.", b"Nobody in Berlin knows, but all of them have read a report."


def tiny_gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"bos_token_id": 101, "eos_token_id": 102, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=64, **ids))


def hugging_face(archive: Any, mode: str, **section: Any) -> tuple[Any, Any, tuple[bytes, ...]]:
    asked = [json.dumps(["Who reads?", text.decode()]).encode() for text in REQUESTS]
    bodies = tuple(asked) if mode == "question_answering" else REQUESTS

    def write(path: Path) -> None:
        folder = path.parent
        _ = text_model(TASKS[mode], folder) if TASKS[mode] else save(folder, tiny_gpt)
        labels(folder, {str(index): f"label {index}" for index in range(9)})
        (folder / "own_transformers.py").write_text(TRANSFORMERS)
        (folder / "sample.txt").write_bytes(bodies[0])

    own = {"wrap": "own_transformers.py", "warmup": {"samples": ["sample.txt"]}, **section}
    config = {
        "handler": {"mode": mode, "max_length": 24, "openvino": own},
        "pt2": {"compile": {"enable": True, "backend": "openvino"}},
    }
    made = archive(config, model_file=None, weights=write, weights_name="model.safetensors", batch_size=2)
    handler = TensorHandler()
    handler.initialize(made.context)
    return made, handler, bodies


def eager(handler: Any, *bodies: bytes) -> Any:
    """Returns the same answers by a model that is not compiled."""
    kind = type(handler)
    one = object.__new__(kind)
    vars(one).update(vars(handler), model=worker_of(handler).eager_model)
    return kind.postprocess(one, kind.inference(one, kind.preprocess(one, [{"body": body} for body in bodies])))


@pytest.mark.parametrize(
    "mode",
    [
        "sequence_classification",
        pytest.param("token_classification", marks=pytest.mark.slow),
        pytest.param("question_answering", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_each_mode_of_the_hugging_face_example(archive, mode) -> None:
    minilm()
    made, handler, bodies = hugging_face(archive, mode)
    assert made.handle(handler, bodies[1]) == eager(handler, bodies[1])
    assert made.handle(handler, *bodies) == eager(handler, *bodies)
    report, outside = report_of(handler)
    assert report["summary"]["coverage"] == 1.0 and not report["fallbacks"] and not outside
    assert report["verify"]["passed"] and report["serving"]["compiles_after_ready"] == 0


def test_its_text_generation_is_counted_and_refused_by_a_policy(archive) -> None:
    minilm()
    made, handler, bodies = hugging_face(archive, "text_generation")
    assert made.handle(handler, *bodies) == eager(handler, *bodies)
    report, outside = report_of(handler)
    assert set(outside) == {"model.generate"} and report["summary"]["coverage"] == 0.0
    assert "compile: [model.generate] compiles the method" in outside["model.generate"]["reason"]
    # Its samples are declared, so it is no advice to declare some.
    assert "no sample shows a call" in report["verify"]["skipped"]
    with pytest.raises(RuntimeError, match=r"outside_compiled: model.generate .*own_transformers.py:\d+"):
        hugging_face(archive, "text_generation", fallback={"allow": [], "on_violation": "refuse"})


@pytest.mark.slow
def test_its_text_generation_compiles_each_step_where_the_model_is_named(archive) -> None:
    minilm()
    made, handler, bodies = hugging_face(archive, "text_generation", compile=["model"])
    assert made.handle(handler, bodies[0]) == eager(handler, bodies[0])
    report, outside = report_of(handler)
    assert not outside and 0.9 < report["summary"]["coverage"] <= 1.0


NET = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = {"labels": ["a", "b", "c"], "scale": 2.0}
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        self.folded = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Unflatten(1, (2, 3)))
    def forward(self, x, kind="tensor"):
        hidden = self.first(x).relu()
        found = self.last(hidden)
        return {"tensor": found, "tuple": (found, [hidden]), "dict": {"logits": found, "hidden": hidden}}[kind]
    def generate(self, x):
        for _ in range(2):
            x = torch.cat([x[:, 1:], self(x)[:, :1]], 1)
        return x
    def encode(self, x):
        return self.first(x)
    def scaled(self, x):
        return x @ self.first.weight.T
"""
# A handler file, but for its `inference`.
HANDLER = """
import torch
from ts.torch_handler.base_handler import BaseHandler

def applied(module, x):
    return module(x)

class Own(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        torch.manual_seed(1)
        self.others = {"head": torch.nn.Linear(3, 2).eval()}

    def preprocess(self, data):
        return torch.tensor([[float(v) for v in row["body"].decode().split(",")] for row in data])

    @torch.no_grad()
    def inference(self, x):
        INFERENCE

    def postprocess(self, found):
        return found.softmax(-1).tolist()
"""
ROWS = b"0.5,-1,2,0.25", b"1,2,-3,4"


def own(archive: Any, inference: str, *, sample: bool = True, **section: Any) -> tuple[Any, Any]:
    # A name for each, because Python imports each module name once.
    name = f"own_{zlib.crc32(inference.encode())}.py"

    def write(path: Path) -> None:
        torch.save(build(NET, "Network").state_dict(), path)
        (path.parent / name).write_text(HANDLER.replace("INFERENCE", inference))
        (path.parent / "sample.txt").write_bytes(ROWS[0])

    warmup = {"samples": ["sample.txt"]} if sample else {"inputs": [{"shape": [4]}]}
    config = {"handler": {"openvino": {"wrap": name, "warmup": warmup, **section}}}
    made = archive(config, model_file=NET, weights=write, batch_size=2)
    handler = TensorHandler()
    handler.initialize(made.context)
    return made, handler


@pytest.mark.parametrize(
    "inference",
    [
        'return self.others["head"](self.model(x))',
        'return applied(self.others["head"], applied(self.model, x))',
        "return self.model(x) + self.model(-x)",
        'return self.model(x) * self.model.config["scale"]',
        'found, (hidden,) = self.model(x, kind="tuple"); return found + hidden.sum(1, keepdim=True)',
        'return self.model(x, "dict")["logits"]',
        "return torch.stack([self.model(row[None])[0] for row in x])",
    ],
    ids=["several models", "by a function", "twice", "attribute", "tuple", "dict", "row by row"],
)
def test_each_use_of_models_is_compiled(archive, inference) -> None:
    made, handler = own(archive, inference)
    for bodies in ([ROWS[1]], list(ROWS)):
        got, expected = made.handle(handler, *bodies), eager(handler, *bodies)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected))
    report, outside = report_of(handler)
    assert not outside and not report["fallbacks"] and report["summary"]["coverage"] == 1.0
    assert report["verify"]["passed"] and report["serving"]["compiles_after_ready"] == 0


def test_a_method_of_the_model_runs_in_eager_and_is_counted_at_its_line(archive) -> None:
    made, handler = own(archive, "return self.model.generate(x)")
    torch.testing.assert_close(torch.tensor(made.handle(handler, *ROWS)), torch.tensor(eager(handler, *ROWS)))
    _, outside = report_of(handler)
    (entry,) = outside.values()
    line = HANDLER[: HANDLER.index("INFERENCE")].count("\n") + 1
    assert (
        "compile: [model.generate] compiles the method, handler.openvino.compile: [model] the calls of model"
        in entry["reason"]
    )
    assert entry["op"] == "model.generate" and re.search(rf"own_\d+\.py:{line}$", entry["where"])


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        ("encode", "[model.encode] compiles the method, handler.openvino.compile: [model.first] the"),
        ("scaled", "[model.scaled] compiles the method"),
    ],
)
def test_the_advice_for_a_method_names_it_and_what_it_calls(archive, method, advice) -> None:
    made, handler = own(archive, f"return self.model.{method}(x)", sample=False)
    made.handle(handler, *ROWS)
    _, outside = report_of(handler)
    (entry,) = outside.values()
    assert entry["op"] == f"model.{method}" and advice in entry["reason"]


def test_what_follows_an_eager_module_is_not_counted_as_its_weights(archive) -> None:
    made, handler = own(archive, "return self.model.folded(x)", sample=False)
    made.handle(handler, *ROWS)
    _, outside = report_of(handler)
    assert set(outside) == {"model.folded"}


def test_a_function_that_takes_a_module_is_no_method_of_it(archive) -> None:
    made, handler = own(archive, 'return applied(self.others["head"], self.model(x))', sample=False)
    made.handle(handler, *ROWS)
    _, outside = report_of(handler)
    assert set(outside) == {"others.head"} and "compile: [others.head]" in outside["others.head"]["reason"]


# The form of TorchServe's diffusers example: no self.model, and an `__init__` that does not call BaseHandler's.
PIPELINE = """
from abc import ABC
from types import SimpleNamespace
import torch
from ts.torch_handler.base_handler import BaseHandler

class Pipeline(BaseHandler, ABC):
    def __init__(self):
        self.initialized = False

    def initialize(self, ctx):
        torch.manual_seed(0)
        self.pipe = SimpleNamespace(text=torch.nn.Linear(4, 8).eval(), unet=torch.nn.Linear(8, 8).eval())
        self.initialized = True

    def preprocess(self, requests):
        return torch.tensor([[float(v) for v in each["body"].decode().split(",")] for each in requests])

    @torch.no_grad()
    def inference(self, x):
        x = self.pipe.text(x)
        for _ in range(3):
            x = self.pipe.unet(x).relu()
        return x

    def postprocess(self, found):
        return found.tolist()
"""


def test_a_pipeline_of_several_models_needs_no_self_model(archive) -> None:
    def write(path: Path) -> None:
        (path.parent / "own_pipeline.py").write_text(PIPELINE)
        (path.parent / "sample.txt").write_bytes(ROWS[0])

    config = {"handler": {"openvino": {"wrap": "own_pipeline.py", "warmup": {"samples": ["sample.txt"]}}}}
    made = archive(config, model_file=None, weights=write, batch_size=2)
    handler = TensorHandler()
    handler.initialize(made.context)
    got, expected = made.handle(handler, *ROWS), handler.pipe.text._call_impl(handler.preprocess(row_items()))
    for _ in range(3):
        expected = handler.pipe.unet._call_impl(expected).relu()
    torch.testing.assert_close(torch.tensor(got), expected.detach())
    report, outside = report_of(handler)
    assert not outside and set(report["serving"]["shapes"]["parts"]) == {"pipe.text", "pipe.unet"}
    assert report["summary"]["coverage"] == 1.0 and report["serving"]["compiles_after_ready"] == 0


def row_items() -> list[dict[str, bytes]]:
    return [{"body": row} for row in ROWS]


@pytest.mark.parametrize("failing", ["return self.model.nothing(x)", "return applied(None, x)"])
def test_a_handler_that_fails_on_its_sample_is_told_where(archive, failing) -> None:
    with pytest.raises(ModelLoadError, match=r"does not answer the sample sample.txt: \w+: .* \(at .*own_\d+.py:\d+\)"):
        own(archive, failing)


@pytest.mark.parametrize(
    ("method", "used"),
    [("encode", "self.model.encode(x)"), ("scaled", "self.model.scaled(x) + self.model(x).sum()"),
     ("generate", "self.model.generate(x=x)")],
)  # fmt: skip
def test_a_method_that_the_yaml_names_is_compiled_as_a_module_is(archive, method, used) -> None:
    path = f"model.{method}"
    made, handler = own(archive, f"return {used}", compile=[path])
    for bodies in ([ROWS[1]], list(ROWS)):
        torch.testing.assert_close(
            *(torch.tensor(each) for each in (made.handle(handler, *bodies), eager(handler, *bodies)))
        )
    report, outside = report_of(handler)
    assert not outside and not report["fallbacks"] and report["summary"]["coverage"] == 1.0
    assert set(report["serving"]["shapes"]["parts"]) == {path} == set(report["verify"]["parts"])
    assert worker_of(handler).report.tracker.verify.passed and report["serving"]["compiles_after_ready"] == 0
