"""TorchServe's own handlers, unchanged, by `handler.openvino.wrap` alone: the same answers as without this package."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from own_handlers import report_of
from serving_worker import labels
from ts.utils.util import list_classes_from_module
from upstream_models import CLASSIFIER, DETECTOR, SEGMENTER, TEXTS, importable, photo, vocabulary

import torchserve_openvino as tov
from encoder import build
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tasks.tensor import TensorHandler

__all__ = ["importable"]

WORDS = "the model is a good one", "a bad one"
PHOTOS = photo(1), photo(2)
# The handler, its model, requests, and the batch size that it can take.
HANDLERS = {
    "image_classifier": (CLASSIFIER, PHOTOS, 2),
    "image_segmenter": (SEGMENTER, PHOTOS, 2),
    "object_detector": (DETECTOR, PHOTOS, 2),
    "text_classifier": (TEXTS, tuple(each.encode() for each in WORDS), 1),
}


def started(archive: Any, name: str, by: str = "wrap", **section: Any) -> tuple[Any, Any]:
    model, bodies, size = HANDLERS[name]
    named = {"wrap": name} if by == "wrap" else {}

    def save(path: Path) -> None:
        torch.save(build(model, "Network").state_dict(), path)
        labels(path.parent, {str(index): f"class {index}" for index in range(6)})
        vocabulary(path.parent / "source_vocab.pt", *WORDS)
        (path.parent / "sample.bin").write_bytes(bodies[0])

    own = {**named, "warmup": {"samples": ["sample.bin"]}, **section}
    made = archive({"handler": {"openvino": own}}, model_file=model, weights=save, batch_size=size)
    kind = (
        TensorHandler if by == "wrap" else type(f"Mine{theirs(name).__name__}", (tov.OpenVINOHandler, theirs(name)), {})
    )
    handler: Any = kind()
    handler.initialize(made.context)
    return made, handler


def theirs(name: str) -> type:
    (kind,) = list_classes_from_module(importlib.import_module(f"ts.torch_handler.{name}"))
    return kind


def upstream(made: Any, name: str) -> Any:
    handler = theirs(name)()
    handler.initialize(made.context)
    return handler


def flat(value: Any) -> list[Any]:
    if not isinstance(value, (dict, list, tuple)):
        return [value]
    keys = list(value) if isinstance(value, dict) else []
    return keys + [leaf for each in (value.values() if keys else value) for leaf in flat(each)]


@pytest.mark.quick(
    "wrap-image_classifier", "mixin-image_segmenter", "wrap-object_detector", "mixin-text_classifier"
)  # fmt: skip
@pytest.mark.parametrize("name", HANDLERS)
@pytest.mark.parametrize("by", ["wrap", "mixin"])
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_it_answers_as_without_this_package(archive, importable, name, by) -> None:
    made, handler = started(archive, name, by)
    (_, bodies, size), plain = HANDLERS[name], upstream(made, name)
    assert type(plain).__name__ in type(handler).__name__
    for batch in [bodies] if size > 1 else [[each] for each in bodies]:
        got, expected = flat(made.handle(handler, *batch)), flat(made.handle(plain, *batch))
        assert made.status(0) == 200 and [type(v) for v in got] == [type(v) for v in expected]
        assert got == [pytest.approx(v, abs=1e-4) if isinstance(v, float) else v for v in expected]
    report, outside = report_of(handler)
    assert not outside and report["verify"]["passed"] and report["summary"]["coverage"] == 1.0
    assert report["serving"]["compiles_after_ready"] <= (name == "text_classifier"), report["recompiles"]


def test_its_explanations_run_on_the_eager_model_and_say_so(archive, importable) -> None:
    made, handler = started(archive, "image_classifier")
    got = made.handle(handler, PHOTOS[0], explain="True")
    expected = made.handle(upstream(made, "image_classifier"), PHOTOS[0], explain="True")
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected))
    _, outside = report_of(handler)
    # Not "handler.openvino.compile: [model] compiles it", which it would not.
    assert {each["reason"] for each in outside.values()} == {
        "explanations need gradients, so they run on the eager model"
    }
    assert "model" in outside
    assert handler.describe_handle()["summary"]["coverage"] == 1.0


def test_a_policy_refuses_an_explanation_and_keeps_the_worker(archive, importable) -> None:
    policy = {"allow": [], "min_coverage": 1.0, "on_violation": "refuse"}
    made, handler = started(archive, "image_classifier", fallback=policy)
    (refused,) = made.handle(handler, PHOTOS[0], explain="True")
    assert made.status(0) == 422 and "explanations need gradients" in refused["message"]
    made.handle(handler, PHOTOS[0])
    assert made.status(0) == 200 and not worker_of(handler).state.watch.replace


def test_what_it_needs_and_lacks_is_named(archive, importable, monkeypatch) -> None:
    monkeypatch.setitem(importlib.sys.modules, "captum.attr", None)
    with pytest.raises(RuntimeError, match=r"wrap: image_segmenter cannot be imported: .*captum.attr"):
        started(archive, "image_segmenter")
