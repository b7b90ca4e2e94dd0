"""Handlers in the forms of TorchServe's examples, with models of their own, by `handler.openvino.wrap` alone."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_handlers import report_of
from upstream_models import photo

import example_handlers
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.torchserve.base import BaseHandler, worker_of
from torchserve_openvino.tasks.tensor import TensorHandler

pytest.importorskip("transformers")


def served(
    archive: Any, source: str, fill: Callable[[Path], Any], sample: bytes, batch_size: int = 1, options: Any = None,
    **section: Any,
) -> tuple[Any, Any]:  # fmt: skip
    # Python imports each module name once.
    name = f"example_{zlib.crc32(f'{source}{section}'.encode())}.py"

    def write(path: Path) -> None:
        fill(path.parent)
        (path.parent / name).write_text(source)
        (path.parent / "sample.bin").write_bytes(sample)

    own = {"wrap": name, "warmup": {"samples": ["sample.bin"]}, **section}
    config: dict[str, Any] = {"handler": {"openvino": own}}
    if options:
        config["pt2"] = {"compile": {"enable": True, "backend": "openvino", "options": options}}
    made = archive(config, model_file=None, weights=write, batch_size=batch_size)
    # As with weights that come by --extra-files.
    del made.manifest["model"]["serializedFile"]
    handler = TensorHandler()
    handler.initialize(made.context)
    return made, handler


def eager(handler: Any, *bodies: bytes) -> Any:
    """Returns what the handler answers by models that are not compiled: parts are where nobody watches."""
    theirs = [each for each in type(handler).__mro__ if each.__module__.startswith("example_")]
    kind = next(each for each in theirs if not each.__name__.startswith("OpenVINO"))
    one = object.__new__(kind)
    vars(one).update(vars(handler), model=worker_of(handler).eager_model)
    for name in ("preprocess", "inference", "postprocess"):
        vars(one).pop(name, None)
    items = [{"body": body} for body in bodies]
    if not issubclass(kind, BaseHandler) or kind.handle is not BaseHandler.handle:
        return kind.handle(one, items, handler.context)
    return one.postprocess(one.inference(one.preprocess(items)))


def same(got: Any, wanted: Any, tolerance: float = 1e-3) -> None:
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), atol=tolerance, rtol=1e-3)


def diffusers(archive: Any, more: str, **section: Any) -> tuple[Any, Any]:
    pytest.importorskip("diffusers")
    from diffusion_models import pipeline_folder

    def fill(folder: Path) -> None:
        pipeline_folder("sd", folder / "pipeline")

    source = example_handlers.DIFFUSERS.replace("MORE", f'output_type="np", {more}')
    return served(archive, source, fill, b"a red cat", **section)


@pytest.mark.slow
def test_a_diffusion_pipeline_with_a_method_of_its_vae(archive) -> None:
    made, handler = diffusers(archive, "", compile=["pipe.unet", "pipe.vae.decode"])
    for body in (b"a red cat", b"two blue dogs"):
        same(made.handle(handler, body), eager(handler, body))
    report, outside = report_of(handler)
    parts = set(report["serving"]["shapes"]["parts"])
    assert not outside and parts == {"pipe.unet", "pipe.vae.decode", "pipe.text_encoder"}
    assert report["summary"]["coverage"] == 1.0 and worker_of(handler).report.tracker.verify.passed
    assert report["serving"]["compiles_after_ready"] == 0


def test_a_method_that_is_called_with_something_else_than_tensors_is_refused_with_the_line_to_add(archive) -> None:
    line = r"\[pipe.vae.post_quant_conv, pipe.vae.decoder\]"
    with pytest.raises(ModelLoadError, match=f"an input holds a Generator; .* handler.openvino.compile: {line}"):
        diffusers(archive, "generator=torch.Generator().manual_seed(1)", compile=["pipe.vae.decode"])


@pytest.mark.slow
def test_wav2vec2(archive) -> None:
    from hub_audio_models import audio_model, encoded, recording

    def fill(folder: Path) -> None:
        audio_model("Wav2Vec2ForCTC", folder)

    first, second = (encoded(recording(0.5, seed)) for seed in (0, 1))
    made, handler = served(archive, example_handlers.WAV2VEC2, fill, first)
    for body in (first, second):
        assert made.handle(handler, body) == eager(handler, body)
    report, outside = report_of(handler)
    assert not outside and report["summary"]["coverage"] == 1.0 and report["verify"]["passed"]
    assert report["serving"]["compiles_after_ready"] == 0
    longer = encoded(recording(0.6, 3))
    assert made.handle(handler, longer) == eager(handler, longer)
    assert report_of(handler)[0]["serving"]["compiles_after_ready"] == 1, "a length that no sample has"


def test_speecht5_runs_in_eager_and_is_told_what_to_name(archive) -> None:
    fill = example_handlers.speech_folder
    made, handler = served(archive, example_handlers.SPEECHT5, fill, b"good day")
    same(made.handle(handler, b"a text"), eager(handler, b"a text"))
    report, outside = report_of(handler)
    assert set(outside) == {"model.generate_speech"} and report["summary"]["coverage"] == 0.0
    line = r"\[model.speecht5.encoder, model.speecht5.decoder.prenet, .*, vocoder\]"
    with pytest.raises(ModelLoadError, match=f"an input holds a SpeechT5HifiGan; .* handler.openvino.compile: {line}"):
        served(archive, example_handlers.SPEECHT5, fill, b"good day", compile=["model.generate_speech"])


@pytest.mark.slow
def test_speecht5_with_its_modules(archive) -> None:
    named = ["model.speecht5.encoder", "model.speecht5.decoder.wrapped_decoder", "vocoder"]
    made, handler = served(
        archive, example_handlers.SPEECHT5, example_handlers.speech_folder, b"good day", compile=named
    )
    for body in (b"good day", b"a longer text"):
        same(made.handle(handler, body), eager(handler, body))
    report, outside = report_of(handler)
    # Its decoder draws random numbers on purpose, and reads a text of its own length in each step.
    assert set(outside) == {"model.generate_speech"} and report["summary"]["coverage"] > 0.85


@pytest.mark.parametrize("named", [pytest.param(False, marks=pytest.mark.slow), True], ids=["as it is", "a method"])
@pytest.mark.slow
def test_a_predictor_around_a_model(archive, named) -> None:
    path = "predictor.model.get_image_embeddings"
    fill, section = example_handlers.sam_folder, {"compile": [path]} if named else {}
    made, handler = served(archive, example_handlers.SEGMENT_ANYTHING, fill, photo(0), **section)
    for seed in (0, 1):
        same(made.handle(handler, photo(seed)), eager(handler, photo(seed)))
    report, outside = report_of(handler)
    assert set(outside) == (set() if named else {path})
    assert report["summary"]["coverage"] > (0.99 if named else 0.85) and worker_of(handler).report.tracker.verify.passed
    assert report["serving"]["compiles_after_ready"] == 0
