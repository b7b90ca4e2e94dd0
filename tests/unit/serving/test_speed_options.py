"""Settings that make a worker faster or smaller, and change no answer."""

import functools
import io

import numpy as np
import pytest
import torch
from own_handlers import BODY, Autocast, start
from PIL import Image
from serving_worker import NETWORK, WARMUP, labels, network, save_weights
from skimage import data

import torchserve_openvino as tov
from encoder import build
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.config import load_serving_config
from torchserve_openvino.config.sections.task_sections import ImageSection
from torchserve_openvino.errors import ConfigError, InexactValueError, WeightsReleasedError
from torchserve_openvino.serving import threads
from torchserve_openvino.serving.loading.labels import labeled
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tasks.image_classifier import ImageClassifier
from torchserve_openvino.tasks.picture_transforms import to_tensor
from torchserve_openvino.tasks.tensor import TensorHandler

CLASSIFIER = """
import torch
class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5, stride=4), torch.nn.ReLU(),
                                       torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(16, 6))
    def forward(self, x):
        return self.net(x)
"""


def classifier() -> torch.nn.Module:
    return build(CLASSIFIER, "Classifier")


def jpeg(array) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "JPEG")
    return buffer.getvalue()


@functools.cache
def photos() -> list[bytes]:
    return [jpeg(data.chelsea()), jpeg(data.coffee()), jpeg(data.rocket())]


def started(archive, handler, section, **arguments):
    made = archive({"handler": {"openvino": section}}, **arguments)
    handler.initialize(made.context)
    return made, handler


def probabilities(raw: bytes) -> dict[str, float]:
    with torch.inference_mode():
        row = torch.softmax(classifier()(to_tensor(raw, ImageSection()).unsqueeze(0)), dim=1)[0]
    return {str(i): float(p) for i, p in enumerate(row)}


@pytest.mark.parametrize("fold", [False, True])
def test_photos_are_classified_as_by_eager_with_and_without_folding(archive, fold) -> None:
    section = {"image": {"fold": fold, "top_k": 6}}
    made, handler = started(
        archive, ImageClassifier(), section, model_file=CLASSIFIER, batch_size=4,
        weights=lambda p: torch.save(classifier().state_dict(), p),
    )  # fmt: skip
    for answer, photo in zip(made.handle(handler, *photos()), photos(), strict=True):
        expected = probabilities(photo)
        assert answer.keys() == expected.keys()
        assert all(abs(answer[name] - expected[name]) < 1e-4 for name in expected)
    summary = worker_of(handler).report.summary
    assert summary.coverage == 1.0 and summary.fallbacks == 0
    (answer,) = made.handle(handler, np.zeros((3, 224, 224)).tolist())
    assert made.status(0) == (400 if fold else 200)
    assert not fold or "image.fold" in answer["message"]
    assert handler.describe_handle()["serving"]["compiles_after_ready"] == 0


def test_folded_pixels_are_a_quarter_of_the_bytes() -> None:
    pixels, ready = (to_tensor(photos()[0], ImageSection(fold=fold)) for fold in (True, False))
    assert pixels.dtype is torch.uint8 and pixels.shape == (224, 224, 3) and pixels.nbytes * 4 == ready.nbytes


def test_throughput_splits_a_batch_over_streams(archive, monkeypatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    section = {"warmup": WARMUP, "execution": {"mode": "throughput"}}
    made, handler = started(archive, TensorHandler(), section, weights=save_weights, batch_size=8)
    rows = [[[float(i), 1.0, 2.0, 3.0]] for i in range(8)]
    for count in (8, 5, 1):
        answers = made.handle(handler, *rows[:count])
        with torch.no_grad():
            expected = network()(torch.tensor(rows[:count])[:, 0])
        torch.testing.assert_close(torch.tensor(answers)[:, 0], expected, rtol=1e-4, atol=1e-5)
    report = handler.describe_handle()
    assert report["config"]["options"]["config.NUM_STREAMS"]["value"] == 2
    assert report["serving"]["shapes"]["signatures"] == ["batch 1", "batch 2", "batch 4"]
    assert report["serving"]["counts"]["split_batches"] == 2 and report["serving"]["compiles_after_ready"] == 0


@pytest.mark.slow
def test_released_weights_leave_right_answers(archive) -> None:
    section = {"warmup": WARMUP, "release_weights": True}
    made, handler = started(archive, TensorHandler(), section, weights=save_weights, batch_size=2)
    assert sum(p.numel() for p in worker_of(handler).eager_model.parameters()) == 0
    rows = [[0.5, -1.0, 2.0, 0.1]]
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(made.handle(handler, rows)[0]), network()(torch.tensor(rows)))
    memory = handler.describe_handle()["serving"]["memory"]
    assert memory["before_release"]["rss"] > 0 and memory["after_release"]["uss"] > 0
    (answer,) = made.handle(handler, [[1.0]])
    assert made.status(0) == 400 and "[batch, 4]" in answer["message"]


def test_weights_that_eager_still_needs_are_kept_and_the_report_says_why(archive) -> None:
    model = NETWORK.replace("return self.last(self.first(x).relu())",
                            "return self.last(torch.digamma(self.first(x).relu() + 1))")  # fmt: skip
    section = {"warmup": WARMUP, "release_weights": True}
    _, handler = started(archive, TensorHandler(), section, model_file=model, weights=save_weights)
    assert sum(p.numel() for p in worker_of(handler).eager_model.parameters()) > 0
    assert any("1 op(s) run in eager" in note for note in handler.describe_handle()["notes"])


def test_release_and_compile_outside_exclude_each_other() -> None:
    section = {"release_weights": True, "batching": {"outside": "compile"}}
    with pytest.raises(ConfigError, match="release_weights: true leaves no weights"):
        load_serving_config({"handler": {"openvino": section}})


def test_release_in_python_needs_a_frozen_model_with_its_own_weights() -> None:
    x = torch.randn(2, 4)
    with torch.no_grad():
        shared = tov.compile(network()).freeze()
        shared(x)
        with pytest.raises(WeightsReleasedError, match="own_weights"):
            shared.release_weights()
        model = network()
        compiled = compile_with(model, CompileSpec(own_weights=True))
        with pytest.raises(WeightsReleasedError, match="freeze"):
            compiled.release_weights()
        expected = model(x)
        compiled.freeze()
        for _ in range(2):
            compiled(x)
        compiled.release_weights()
        torch.testing.assert_close(compiled(x), expected)
        with pytest.raises(WeightsReleasedError, match="not compiled before"):
            compiled(torch.randn(3, 4))


def test_an_index_out_of_range_is_refused_after_release_too() -> None:
    embed = torch.nn.Embedding(5, 3)
    compiled = compile_with(embed, CompileSpec(own_weights=True)).freeze()
    with torch.no_grad():
        for _ in range(2):
            compiled(torch.tensor([1, 2]))
        compiled.release_weights()
        with pytest.raises(InexactValueError):
            compiled(torch.tensor([1, 5]))
    assert not compiled.report.fallbacks


def test_labels_name_the_classes(archive, tmp_path) -> None:
    made = archive(
        {"handler": {"openvino": {"image": {"fold": True, "top_k": 1}}}}, model_file=CLASSIFIER,
        weights=lambda p: torch.save(classifier().state_dict(), p),
    )  # fmt: skip
    from pathlib import Path

    labels(Path(made.context.system_properties["model_dir"]), {str(i): f"class {i}" for i in range(6)})
    handler = ImageClassifier()
    handler.initialize(made.context)
    (answer,) = made.handle(handler, photos()[0])
    expected = probabilities(photos()[0])
    assert list(answer) == [f"class {max(expected, key=expected.__getitem__)}"]


def test_a_class_without_a_label_is_named_by_its_number() -> None:
    assert labeled([[0.6, 0.4]], {"3": "cat"}, [[3, 7]]) == [{"cat": 0.6, "7": 0.4}]
    assert labeled([[0.6, 0.4]], None, [[3, 7]]) == [{"3": 0.6, "7": 0.4}]


def test_weights_are_released_in_the_modes_in_which_the_handler_calls(archive) -> None:
    made, handler = start(archive, Autocast, sample=False, warmup=WARMUP, freeze=True, release_weights=True)
    assert worker_of(handler).served.released
    assert made.handle(handler, BODY) and made.status(0) == 200
