"""What one client sends costs the others nothing: hostile requests get their own 4xx, within bounds, beside answers."""

import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from pydantic import ValidationError
from serving_worker import ROWS, Archive, close, save_weights
from task_worker import Worker

from hub_models import text_model
from torchserve_openvino.config.sections.task_sections import ImageSection
from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError, UnsupportedMediaTypeError
from torchserve_openvino.serving.requests.envelopes import Envelope
from torchserve_openvino.serving.torchserve import frontend_limits
from torchserve_openvino.serving.torchserve.calls import answered_call
from torchserve_openvino.tasks.generation.text_parameters import TextParameters
from torchserve_openvino.tasks.picture_transforms import to_tensor
from torchserve_openvino.tasks.tensor import TensorHandler
from torchserve_openvino.tasks.tensors import JSON_TYPES, parse
from torchserve_openvino.tasks.text.fill_mask import FillMask
from torchserve_openvino.tasks.text.reranker import Reranker
from torchserve_openvino.tasks.text.zero_shot import ZeroShotClassifier

LIMIT = 1 << 20
DIGITS = b'{"inputs": ' + b"9" * 5000 + b"}"


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Archive, TensorHandler]]:
    config = {"handler": {"openvino": {"warmup": {"inputs": [{"shape": [4]}]}}}}
    folder, handler = tmp_path_factory.mktemp("tensors") / "archive", TensorHandler()
    made = Archive(folder, config, weights=save_weights, batch_size=4)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        handler.initialize(made.context)
        torch.set_num_threads(threads)
        yield made, handler


def text_worker(kind: Any, tmp_path_factory: pytest.TempPathFactory, **text: Any) -> Worker:
    place = tmp_path_factory.mktemp(kind.task)
    openvino = {"text": {"lengths": [16, 64], **text}, "batching": {"buckets": [4]}}
    return Worker(place / "archive", kind, text_model(kind.task, place / "saved"), openvino)


# --- one bad request beside a good one ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        DIGITS, b"[" * 100_000, "\ud800", {"inputs": [[10**400]]}, {"data": [["a" * 100_000, "b"]]},
        {"inputs": {"x": 10**24}},
        {"data": [[1, 2, 3, 4]], "dtype": "quint8"}, {"data": [[1, 2, 3, 4]], "dtype": ["float32"]},
        {"inputs": [{"name": "x", "shape": [0, 10**24], "datatype": "FP32", "data": []}]},
        {"inputs": [{"name": ["x"], "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]},
        {"inputs": [{"name": "x", "shape": [1, 4], "datatype": {}, "data": [1, 2, 3, 4]}]},
        {"inputs": [{"shape": [1], "datatype": "FP32", "data": [1]}] * 100_000},
        {"inputs": dict.fromkeys(map(str, range(999)), 1)},
    ],
    ids=range(13),
)  # fmt: skip
def test_a_bad_tensor_request_gets_its_own_4xx(tensors, bad) -> None:
    made, handler = tensors
    answers = made.handle(handler, ROWS, bad)
    assert made.status(0) == 200 and made.status(1) in {400, 413, 415}, answers[1]
    close(answers[0])
    assert len(answers[1]["message"]) < 2100


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "x", "shape": [0, 10**24], "datatype": "FP32", "data": []},
        {"name": "x", "shape": [2], "datatype": "FP32", "data": ["a" * 1_000_000, *["b"] * 1_000_000]},
        {"name": "x", "shape": [10**30], "datatype": "FP32", "data": [1]},
        {"name": "x", "shape": [1], "datatype": "FP32", "data": [10**400]},
        {"name": ["x"], "shape": [1], "datatype": "FP32", "data": [1]},
        {"name": "x", "shape": [1], "datatype": [], "data": [1]},
    ],
    ids=range(6),
)
def test_a_bad_input_of_an_envelope_is_refused_without_an_array(entry) -> None:
    envelope = Envelope("kservev2")
    try:
        (item,) = envelope.open({"inputs": [entry]}).items
    except InvalidInputError as error:
        item = error
    # Numbers of any size are Python's, so it is the handler that refuses them.
    assert isinstance(item, InvalidInputError) or item["data"] == [10**400]


def test_requests_with_too_many_items_are_refused_before_any_is_answered(tmp_path_factory) -> None:
    worker = text_worker(Reranker, tmp_path_factory, max_inputs=3)
    ranking = {"query": "Where?", "texts": ["here", "there"]}
    made, handler = worker.made, worker.handler
    many, few = ({"instances": [{"data": ranking}] * count} for count in (4, 2))
    made.handle(handler, ranking, ranking)
    bodies = answered_call(handler._openvino, [{"body": many}, {"body": few}], made.context, "json")
    assert [made.status(i) for i in range(2)] == [413, 200]
    assert "4 inputs in one request; the most is 3" in bodies[0]["message"]
    # The query is read with each text.
    refused = worker.one({"query": "q" * 600_000, "texts": ["a", "b"]})
    assert worker.status() == 413 and "handler.openvino.text.max_bytes" in refused["message"]


# --- answers ------------------------------------------------------------------------------------------------------


def test_an_answer_that_the_frontend_does_not_take_is_refused_alone(tensors, monkeypatch) -> None:
    made, handler = tensors
    monkeypatch.setattr(frontend_limits, "_of_parent", lambda: 400)
    rows = ROWS * 60
    answers = made.handle(handler, ROWS, rows, npy(np.array(rows, np.float32)), {"inputs": {"x": ROWS}})
    assert [made.status(i) for i in range(4)] == [200, 413, 413, 200]
    assert "max_response_size is 400" in answers[1]["message"] and "config.properties" in answers[1]["message"]
    close(answers[0])


# --- .npy ---------------------------------------------------------------------------------------------------------


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def header(text: str, data: bytes = b"", version: int = 1) -> bytes:
    raw = text.encode("latin-1")
    length = struct.pack("<H" if version == 1 else "<I", len(raw))
    return b"\x93NUMPY" + bytes([version, 0]) + length + raw + data


@pytest.mark.parametrize(
    ("descr", "shape"),
    [
        ("|S0", "(2000000000,)"), ("<U0", "(2000000000,)"), ("|V0", "(2000000000,)"), ("<f4", "(2000000000,)"),
        ("<f4", "(0, 10000000000000000000000000)"), ("<f4", "(-1,)"), ("<f4", "(True, 4)"), ("<f4", "None"),
        ("<f4", f"({'1,' * 70})"), ("<f4", f"({'9' * 400},)"), ("<x9", "(4,)"), ("", "(4,)"), ("f4,f4", "(1,)"),
        ("<M8[s]", "(1,)"), ("|O", "(1,)"), ("<f16", "(1,)"),
    ],
)  # fmt: skip
def test_headers_that_claim_what_is_not_there_are_refused(descr, shape) -> None:
    body = header(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n", b"\0" * 16)
    with pytest.raises(InvalidInputError, match=r"\.npy"):
        parse(body, LIMIT)


@pytest.mark.parametrize(
    "body",
    [
        header("{" * 3000), header("(" * 9000), header("{'descr': __import__('os')}"), header(""), header("\0" * 99),
        header("{'descr': '<f4', 'fortran_order': 3, 'shape': (1,)}"), header("{}", version=9), b"\x93NUMPY",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
    ],
    ids=range(9),
)  # fmt: skip
def test_headers_that_are_none_are_refused(body) -> None:
    with pytest.raises(InvalidInputError, match=r"\.npy body cannot be read"):
        parse(body, LIMIT)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [">f4", "<f8", "|b1", "<u2", ">i8", "<c8", "<f2"])
def test_arrays_of_any_byte_order_and_layout_are_read(dtype, order) -> None:
    array = np.asarray(np.arange(12).reshape(3, 4) % 5, dtype=dtype, order=order)
    (tensor,) = parse(npy(array), LIMIT).positional
    assert np.array_equal(tensor.numpy(), array) and tensor.is_contiguous()


# --- types --------------------------------------------------------------------------------------------------------


def test_every_type_of_torch_is_read_or_refused() -> None:
    names = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
    for name in [*names, "nn", "Tensor", "__name__", "", "float33"]:
        try:
            (tensor,) = parse({"data": [[0, 1]], "dtype": name}, LIMIT).positional
            assert str(tensor.dtype) == f"torch.{name}" and name in JSON_TYPES
        except InvalidInputError as error:
            assert name not in JSON_TYPES and "float32" in str(error)


# --- pictures -----------------------------------------------------------------------------------------------------


def picture(width: int, height: int, kind: str = "PNG", mode: str = "1") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("size", [(1, 6000), (6000, 1), (2, 3000), (1, 60_000)])
def test_the_longer_side_of_a_thin_picture_is_bounded(size, monkeypatch) -> None:
    monkeypatch.setattr(Image.Image, "resize", lambda *_: pytest.fail("it was resized"))
    with pytest.raises(PayloadTooLargeError, match=r"handler\.openvino\.image\.max_resized_pixels 16777216"):
        to_tensor(picture(*size), ImageSection())


def test_a_picture_is_only_opened_in_a_format_that_is_named(monkeypatch) -> None:
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\n%%EOF\n"
    for body in (eps, picture(9, 9, "PPM", "RGB"), picture(9, 9, "PCX", "RGB")):
        with pytest.raises(UnsupportedMediaTypeError, match="JPEG, PNG, WEBP, GIF, BMP, TIFF"):
            to_tensor(body, ImageSection())
    assert to_tensor(picture(9, 9, "PPM", "RGB"), ImageSection(formats=["ppm"])).shape == (3, 224, 224)
    with pytest.raises(UnsupportedMediaTypeError, match="formats PPM"):
        to_tensor(picture(9, 9), ImageSection(formats=["PPM"]))
    with pytest.raises(ValidationError, match="valid formats: JPEG, PNG"):
        ImageSection(formats=["EPS"])


@pytest.mark.parametrize("number", [10**400, "1", None, [1]], ids=["digits", "text", "null", "list"])
def test_lists_in_place_of_a_picture_hold_numbers(number) -> None:
    lists: Any = [[[0.5] * 4] * 4] * 3
    lists[0] = [[0.5] * 4] * 3 + [[0.5] * 3 + [number]]
    with pytest.raises(InvalidInputError):
        to_tensor(lists, ImageSection(resize=4, crop=4))


# --- texts --------------------------------------------------------------------------------------------------------


def scores(answer: list[dict[str, Any]]) -> dict[str, float]:
    return {each["label"]: each["score"] for each in answer}


def test_texts_are_bounded_before_they_are_tokenized(tmp_path_factory) -> None:
    worker = text_worker(ZeroShotClassifier, tmp_path_factory, max_bytes=2000)
    labels = {"candidate_labels": ["travel", "sleep"]}
    good = {"inputs": "The train leaves.", "parameters": labels}
    quiet = scores(worker.one(good))
    hostile: list[Any] = [
        # TorchServe has parsed JSON already, and passes on what it can't parse.
        ({"inputs": "word " * 500, "parameters": labels}, 413),
        (bytearray(DIGITS), 413),
        (bytearray(b'{"inputs": ' + b"9" * 1900), 400),
        ({"inputs": "a" * 1100, "parameters": labels}, 413),
        ({"inputs": "a", "parameters": {**labels, "hypothesis_template": "{}" * 400}}, 413),
        ({"inputs": "a", "parameters": {"candidate_labels": ["\ud800", "b"]}}, 400),
        ({"inputs": "a", "parameters": {**labels, "hypothesis_template": "{} \ud800"}}, 400),
        ({"inputs": "a\udfff", "parameters": labels}, 400),
        ({"inputs": "a", "parameters": {**labels, "\ud800": 1}}, 400),
        ({"inputs": "a", "parameters": {**labels, "multi_label": [[]] * 100}}, 400),
    ]
    for body, status in hostile:
        answers = worker(good, body)
        assert worker.status(0) == 200 and scores(answers[0]) == pytest.approx(quiet, abs=1e-4), body
        assert worker.status(1) == status, answers[1]


def test_the_words_for_several_masks_are_bounded(tmp_path_factory) -> None:
    worker = text_worker(FillMask, tmp_path_factory)
    refused = worker.one({"inputs": "[MASK] " * 20, "parameters": {"top_k": 51}})
    assert worker.status() == 400 and "20 masks with top_k 51 are 1020 words; the most is 1000" in refused["message"]
    assert len(worker.one({"inputs": "[MASK] " * 20, "parameters": {"top_k": 2}})) == 20


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 1e-300},
        {"temperature": 0.0009},
        {"repetition_penalty": 1e-300},
        {"top_k": 2**31},
    ],
    ids=str,
)
def test_sampling_that_float32_has_no_numbers_for_is_refused(field) -> None:
    with pytest.raises(ValidationError):
        TextParameters(**field)
    TextParameters(temperature=0.001, top_p=1e-6, repetition_penalty=0.01, top_k=2**31 - 1)
    TextParameters(temperature=0)
    assert TextParameters(top_p=1e-300).top_p == TextParameters(top_p=0).top_p == 1e-6


def test_a_recording_of_many_samples_in_few_bytes_is_refused_by_their_number() -> None:
    soundfile = pytest.importorskip("soundfile")
    sound = pytest.importorskip("torchserve_openvino.tasks.audio.sound")
    buffer = io.BytesIO()
    rate = 192_000
    with soundfile.SoundFile(buffer, "w", samplerate=rate, channels=1, format="FLAC") as file:
        for _ in range(330):
            file.write(np.zeros(rate, dtype=np.int16))
    body = buffer.getvalue()
    # Five and a half minutes of silence, shorter than Whisper's ten.
    assert len(body) < LIMIT
    with pytest.raises(PayloadTooLargeError, match=r"more than 60000000 samples at 192000 Hz"):
        sound.samples_of(body, 16_000, sound.RecordingLimits(seconds=600, bytes=32 * LIMIT))
