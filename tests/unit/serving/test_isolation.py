"""A batch that fails is run item by item, so that only the faulty item fails; also in an envelope."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from serving_worker import NETWORK, WARMUP, close, network, save_weights
from ts.context import RequestProcessor
from ts.torch_handler.base_handler import BaseHandler
from ts.torch_handler.request_envelope.json import JSONEnvelope
from ts.torch_handler.request_envelope.kserve import KServeEnvelope
from ts.torch_handler.request_envelope.kservev2 import KServev2Envelope
from ts.utils.util import PredictionException

import torchserve_openvino as tov
from torchserve_openvino.errors import InvalidInputError, ItemError
from torchserve_openvino.serving.requests.envelopes import Content, Envelope
from torchserve_openvino.serving.requests.messages import Request
from torchserve_openvino.tasks.tensor import TensorHandler

GOOD, OTHER = [[0.5, -1.0, 2.0, 0.1]], [[1.0, 2.0, 3.0, 4.0]]


def started(handler, made):
    handler.initialize(made.context)
    return handler


class Theirs(BaseHandler):
    """A user's handler, in which any exception fails the batch."""

    def preprocess(self, data):
        rows = []
        for row in data:
            text = (row["body"] if isinstance(row, dict) else row).decode()
            if text == "teapot":
                raise PredictionException("short and stout", 418)
            rows.append([float(n) for n in text.split(",")])
        return torch.tensor(rows)

    def postprocess(self, outputs):
        return [int(row.argmax()) for row in outputs]


class Mine(tov.OpenVINOHandler, Theirs):
    pass


def test_one_bad_item_of_a_users_handler_fails_alone(archive) -> None:
    made = archive(weights=save_weights, batch_size=4)
    handler = started(Mine(), made)
    answers = made.handle(handler, b"0.5,-1,2,0.1", b"no number", b"teapot", b"1,2,3,4")
    with torch.no_grad():
        expected = network()(torch.tensor(GOOD + OTHER)).argmax(1).tolist()
    assert [answers[0], answers[3]] == expected
    assert [made.status(i) for i in range(4)] == [200, 500, 418, 200]
    assert "ValueError" in answers[1]["message"] and answers[2]["message"] == "short and stout"
    assert handler.describe_handle()["serving"]["counts"]["retried_batches"] == 1


def exhausted() -> None:
    raise MemoryError


@pytest.mark.parametrize("exhaust", [exhausted, lambda: torch.empty(1 << 50)], ids=["python", "torch"])
def test_an_item_that_needs_too_much_memory_fails_alone_with_torchserves_own_507(archive, monkeypatch, exhaust) -> None:
    made = archive(weights=save_weights, batch_size=2)
    handler = started(Mine(), made)
    preprocess = handler.preprocess

    def full(data):
        if any(item["body"] == b"large" for item in data):
            exhaust()
        return preprocess(data)

    monkeypatch.setattr(handler, "preprocess", full)
    answers = made.handle(handler, b"large", b"1,2,3,4")
    assert [made.status(i) for i in range(2)] == [507, 200]
    assert answers[0]["type"] == "OutOfMemoryError" and isinstance(answers[1], int)


def test_too_few_answers_are_retried_one_by_one(archive, monkeypatch) -> None:
    made = archive(weights=save_weights, batch_size=2)
    handler = started(Mine(), made)
    monkeypatch.setattr(handler, "postprocess", lambda outputs: [1])
    answers = made.handle(handler, b"1,2,3,4", b"1,2,3,4")
    # Run one by one, each item gets the one answer of this postprocess.
    assert answers == [1, 1]


def test_postprocess_must_return_a_list(archive, monkeypatch) -> None:
    made = archive(weights=save_weights)
    handler = started(Mine(), made)
    monkeypatch.setattr(handler, "postprocess", lambda outputs: "text")
    (answer,) = made.handle(handler, b"1,2,3,4")
    assert made.status(0) == 500 and "must return a list" in answer["message"]


def test_non_finite_answers_can_be_refused(archive) -> None:
    section = {
        "warmup": {"inputs": [{"shape": [4]}]},
        "outputs": {"non_finite": "refuse"},
        "verify": {"against": "off"},
    }
    model = NETWORK.replace("relu())", "relu()) / x[:, :1]")
    made = archive({"handler": {"openvino": section}}, model_file=model, weights=save_weights, batch_size=2)
    handler = started(TensorHandler(), made)
    answers = made.handle(handler, GOOD, [[0.0, 1.0, 1.0, 1.0]])
    assert [made.status(i) for i in range(2)] == [200, 422]
    assert answers[1]["type"] == "NonFiniteOutputError" and isinstance(answers[0], list)


def test_a_misspelt_name_beside_a_known_one_is_refused(archive) -> None:
    model = NETWORK.replace("def forward(self, x)", "def forward(self, x, mask)").replace(
        "relu())", "relu()) * mask[:, :1]"
    )
    section = {"warmup": {"inputs": [{"shape": [4]}, {"shape": [4]}]}}
    made = archive({"handler": {"openvino": section}}, model_file=model, weights=save_weights)
    handler = started(TensorHandler(), made)
    x, mask = [[1.0, 2.0, 3.0, 4.0]], [[2.0, 0.0, 0.0, 0.0]]

    def answered(**tensors: list[list[float]]) -> Any:
        inputs = [{"name": n, "shape": [1, 4], "datatype": "FP32", "data": data[0]} for n, data in tensors.items()]
        (answer,) = made.handle(handler, {"inputs": inputs})
        return answer["outputs"][0]["data"] if made.status(0) == 200 else answer["message"]

    expected = answered(x=x, mask=mask)
    assert expected == answered(mask=mask, x=x) == answered(a=x, b=mask) != answered(a=mask, b=x)
    for wrong in ({"mask": mask, "z": x}, {"x": x, "masc": mask}):
        assert "the model has no input" in answered(**wrong)


def test_non_finite_answers_are_null_in_json_and_as_they_are_in_npy(archive) -> None:
    section = {"warmup": {"inputs": [{"shape": [4]}]}, "verify": {"against": "off"}}
    model = NETWORK.replace("relu())", "relu()) / x[:, :1]")
    made = archive({"handler": {"openvino": section}}, model_file=model, weights=save_weights, batch_size=2)
    handler = started(TensorHandler(), made)
    row = np.array([[0.0, 1.0, 1.0, 1.0]], dtype=np.float32)
    buffer = io.BytesIO()
    np.save(buffer, row)
    as_lists, as_npy = made.handle(handler, row.tolist(), buffer.getvalue())
    assert made.status(0) == 200 and as_lists == [[None] * 3]
    assert not np.isfinite(np.load(io.BytesIO(as_npy))).any()
    (v2_answer,) = enveloped(made, KServev2Envelope, handler, v2(row.tolist()))
    assert v2_answer["outputs"][0]["data"] == [None] * 3 and v2_answer["outputs"][0]["datatype"] == "FP32"
    (enveloped_answer,) = enveloped(made, JSONEnvelope, handler, {"instances": row.tolist()})
    assert enveloped_answer == {"predictions": [[None] * 3]}


# --- envelopes ----------------------------------------------------------------------------------------------


def enveloped(made, envelope_class, handler, *bodies):
    """Handles a batch in an envelope, which wraps the handler as TorchServe's loader does."""
    return made.handle(envelope_class(handler.handle), *bodies)


def test_json_envelope_keeps_requests_and_items_apart(archive) -> None:
    made = archive(weights=save_weights, batch_size=4)
    handler = started(Mine(), made)

    def instance(text: str) -> dict[str, str]:
        return {"b64": base64.b64encode(text.encode()).decode()}

    answers = enveloped(
        made, JSONEnvelope, handler,
        {"instances": [instance("0.5,-1,2,0.1"), instance("bad")]}, {"nothing": 1},
        {"instances": [instance("1,2,3,4")]}, {"instances": [instance("bad")]},
    )  # fmt: skip
    with torch.no_grad():
        expected = network()(torch.tensor(GOOD + OTHER)).argmax(1).tolist()
    assert [made.status(i) for i in range(4)] == [207, 400, 200, 500]
    first = json.loads(answers[0])["predictions"]
    assert first[0] == expected[0] and first[1]["code"] == 500
    assert "instances" in answers[1]["message"]
    assert json.loads(answers[2])["predictions"] == expected[1:]


@pytest.mark.parametrize("envelope", [JSONEnvelope, KServeEnvelope])
def test_tensors_in_envelopes(archive, envelope) -> None:
    made = archive(weights=save_weights, batch_size=4)
    handler = started(TensorHandler(), made)
    answers = enveloped(made, envelope, handler, {"instances": GOOD}, {"instances": [[1.0]]}, {"instances": OTHER})
    assert [made.status(i) for i in range(3)] == [200, 400, 200]
    close(answers[0]["predictions"], GOOD)
    close(answers[2]["predictions"], OTHER)


def v2(rows, name="x", **more):
    shape = [len(rows), len(rows[0])]
    data = [n for row in rows for n in row]
    return {"inputs": [{"name": name, "shape": shape, "datatype": "FP32", "data": data}], **more}


def test_kserve_v2_envelope_takes_whole_batches(archive) -> None:
    made = archive(weights=save_weights, batch_size=4)
    handler = started(TensorHandler(), made)
    bad = v2(GOOD)
    bad["inputs"][0]["shape"] = [3, 3]
    answers = enveloped(made, KServev2Envelope, handler, v2(GOOD, id="a"), bad, v2(OTHER), b"{")
    assert [made.status(i) for i in range(4)] == [200, 400, 200, 400]
    assert answers[0]["id"] == "a" and "error" not in answers[0]
    # Where clients of the protocol look for it.
    assert "shape" in answers[1]["error"] and "not valid JSON" in answers[3]["error"]
    close([answers[0]["outputs"][0]["data"]], GOOD)
    close([answers[2]["outputs"][0]["data"]], OTHER)


def test_strings_of_kserve_v2_stay_apart() -> None:
    envelope = Envelope("kservev2")

    def opened(data):
        entry = {"name": "text", "shape": [-1], "datatype": "BYTES", "data": data}
        (item,) = envelope.open({"inputs": [entry]}).items
        return item if isinstance(item, ItemError) else item["data"]

    # Upstream takes the first element, of a bare string the first letter.
    assert opened(["one"]) == opened("one") == "one"
    assert opened(["one", "two"]) == opened([["one"], ["two"]]) == ["one", "two"]
    deep: list = ["one"]
    for _ in range(400):
        deep = [deep]
    for bad in ([], [7], ["one", None], {}, [["one"], ["two", "three"]], deep):
        refused = opened(bad)
        assert isinstance(refused, InvalidInputError) and "list of strings" in str(refused)


@pytest.mark.parametrize(("answer", "datatype", "shape", "data"), [
    ([[0.5, 1.0], [2.0, 3.0]], "FP64", [2, 2], [0.5, 1.0, 2.0, 3.0]),
    (["a", "bc"], "BYTES", [2], ["a", "bc"]),
    ({"glad": 0.5}, "BYTES", [1], [{"glad": 0.5}]),
    ([[{"word": "a"}, {"word": "b"}], []], "BYTES", [2], [[{"word": "a"}, {"word": "b"}], []]),
    ([[{"word": "a"}], [{"word": "b"}]], "BYTES", [2], [[{"word": "a"}], [{"word": "b"}]]),
    ([[0.5, 1.0], {"code": 400}], "BYTES", [2], [[0.5, 1.0], {"code": 400}]),
])  # fmt: skip
def test_answers_of_kserve_v2_keep_their_shape(answer, datatype, shape, data) -> None:
    content = Content([1], ("x",), "id")
    (output,) = Envelope("kservev2").close(content, [answer], Request({}))["outputs"]
    assert output == {"name": "x", "datatype": datatype, "shape": shape, "data": data}


def test_kserve_v2_envelope_around_a_users_handler(archive) -> None:
    class Lists(tov.OpenVINOHandler, BaseHandler):
        def preprocess(self, data):
            return torch.tensor([row["data"] for row in data])

    made = archive(weights=save_weights, batch_size=4)
    handler = started(Lists(), made)

    def request(row):
        return {"inputs": [{"name": "x", "shape": [4], "datatype": "FP32", "data": row}]}

    answers = enveloped(made, KServev2Envelope, handler, request(GOOD[0]), request([1.0]), request(OTHER[0]))
    assert [made.status(i) for i in range(3)] == [200, 400, 200]
    close([answers[0]["outputs"][0]["data"]], GOOD)
    assert answers[2]["id"] == "request-2"


def test_envelopes_of_other_handlers_stay_upstreams(archive) -> None:
    class Plain:
        def handle(self, data, context):
            return [sum(row) for row in data]

    made = archive(weights=save_weights)
    started(TensorHandler(), made)
    (answer,) = JSONEnvelope(Plain().handle).handle([{"body": {"instances": [[1, 2], [3, 4]]}}], made.context)
    assert json.loads(answer) == {"predictions": [3, 7]}


def test_describe_through_an_envelope(archive) -> None:
    made = archive({"handler": {"openvino": {"warmup": WARMUP}}}, weights=save_weights)
    handler = started(TensorHandler(), made)
    made.context.request_processor = [RequestProcessor({"describe": "True"})]
    (report,) = JSONEnvelope(handler.handle).handle([{"body": b""}], made.context)
    assert report["schema"] == 1


def test_a_fault_while_decoding_one_item_leaves_the_others_alone(archive, monkeypatch) -> None:
    made = archive(weights=save_weights, batch_size=3)
    handler = started(TensorHandler(), made)
    real = handler.decode

    def decode(item):
        if item["body"] == "fault":
            raise SystemError("a fault of the interpreter")
        if item["body"] == "large":
            raise MemoryError
        return real(item)

    monkeypatch.setattr(handler, "decode", decode)
    answers = made.handle(handler, GOOD, "fault", "large")
    assert [made.status(i) for i in range(3)] == [200, 500, 413]
    close(answers[0], GOOD)


class Spreads(BaseHandler):
    """A user's handler that gives all items of a failed batch its status."""

    def preprocess(self, data):
        try:
            return torch.tensor([[float(n) for n in row["body"].decode().split(",")] for row in data])
        except ValueError:
            self.context.set_all_response_status(500, "no numbers")
            raise

    def postprocess(self, outputs):
        return [int(row.argmax()) for row in outputs]


class Spreading(tov.OpenVINOHandler, Spreads):
    pass


def test_the_status_of_a_failed_batch_is_not_that_of_its_good_items(archive) -> None:
    made = archive(weights=save_weights, batch_size=3)
    handler = started(Spreading(), made)
    made.handle(handler, b"0.5,-1,2,0.1", b"no number", b"1,2,3,4")
    assert [made.status(i) for i in range(3)] == [200, 500, 200]


def test_a_part_of_an_instance_that_is_no_base64_is_refused_alone(archive) -> None:
    made = archive(weights=save_weights, batch_size=2)
    handler = started(Mine(), made)
    (answer,) = enveloped(
        made, JSONEnvelope, handler,
        {"instances": [{"body": {"b64": "%%%"}}, {"body": {"b64": base64.b64encode(b"0.5,-1,2,0.1").decode()}}]},
    )  # fmt: skip
    first, second = json.loads(answer)["predictions"]
    assert made.status(0) == 207 and isinstance(second, int)
    assert first["code"] == 400 and "not base64" in first["message"]


class ByHeader(Theirs):
    """Answers each item with a header of its request."""

    def postprocess(self, outputs):
        return [str(self.context.get_request_header(number, "name")) for number in range(len(outputs))]


class MineByHeader(tov.OpenVINOHandler, ByHeader):
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_items_see_the_headers_of_their_own_requests(archive, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    made = archive(weights=save_weights, batch_size=4)
    handler = started(MineByHeader(), made)
    good = {"b64": base64.b64encode(b"0.5,-1,2,0.1").decode()}
    bad = {"b64": base64.b64encode(b"teapot").decode()}
    bodies = [{"nothing": 1}, {"instances": [good]}, {"instances": [bad, good] if fails else [good, good]}]
    headers = [{"explain": "False", "name": name} for name in "abc"]
    _, second, third = made.handle_with(JSONEnvelope(handler.handle), bodies, headers)
    first, last = (json.loads(answer)["predictions"] if isinstance(answer, str) else answer["predictions"]
                   for answer in (second, third))  # fmt: skip
    assert first == ["b"] and last[1] == "c" and (last[0]["code"] == 418 if fails else last[0] == "c")
