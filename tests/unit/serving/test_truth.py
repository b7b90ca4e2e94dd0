"""What READY means: what is verified, what is not and why, and which batch sizes a model takes."""

import collections
import logging
import traceback

import numpy as np
import openvino as ov
import pytest
import torch
import yaml
from serving_worker import METRICS, NETWORK, WARMUP, network, save_weights, sent
from torch import nn
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException

import torchserve_openvino as tov
from torchserve_openvino.config.vocabulary import FALLBACK_KINDS
from torchserve_openvino.errors import ModelLoadError, VerificationError
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tasks.tensor import TensorHandler

ROWS = [[0.5, -1.0, 2.0, 0.1]]
KNOWN = {"warmup": WARMUP}


def exported(path, example=2, largest=None, model=None) -> None:
    shapes = ({0: torch.export.Dim("batch", max=largest)},) if largest else None
    torch.export.save(torch.export.export(model or network(), (torch.rand(example, 4),), dynamic_shapes=shapes), path)


def served(archive, section, **arguments):
    made = archive({"handler": {"openvino": section}}, **arguments)
    handler = TensorHandler()
    handler.initialize(made.context)
    return made, handler


def program(archive, write, section=KNOWN, batch_size=1):
    return served(archive, section, model_file=None, weights=write, weights_name="model.pt2", batch_size=batch_size)


def test_an_exported_program_is_verified_and_joined_like_its_class(archive) -> None:
    made, handler = program(archive, lambda p: exported(p, largest=16), batch_size=4)
    report = handler.describe_handle()
    assert report["verify"]["passed"] is True
    assert report["serving"]["shapes"]["joins_requests"] is True
    assert report["serving"]["shapes"]["signatures"] == ["batch 1", "batch 2", "batch 4"]
    answers = made.handle(handler, ROWS, ROWS, ROWS)
    torch.testing.assert_close(torch.tensor(answers[2]), network()(torch.tensor(ROWS)), rtol=1e-4, atol=1e-5)


def test_an_export_for_one_batch_size_is_served_at_that_with_a_note(archive, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        made, handler = program(archive, lambda p: exported(p, example=1), batch_size=4)
    report = handler.describe_handle()
    assert report["verify"]["passed"] is True and report["serving"]["shapes"]["signatures"] == ["batch 1"]
    assert any("the model takes no batch of 2, 3, 4" in note for note in report["notes"])
    assert "the model takes no batch of 2, 3, 4" in caplog.text
    answers = made.handle(handler, ROWS, ROWS)
    assert [made.status(i) for i in range(2)] == [200, 200] and answers[0] == answers[1]
    assert report["serving"]["compiles_after_ready"] == 0


def test_a_largest_batch_of_a_program_limits_the_buckets(archive) -> None:
    made, handler = program(archive, lambda p: exported(p, largest=2), batch_size=4)
    assert handler.describe_handle()["serving"]["shapes"]["signatures"] == ["batch 1", "batch 2"]
    assert len(made.handle(handler, *[ROWS] * 4)) == 4 and made.status(3) == 200


def test_a_batch_that_is_asked_for_and_not_taken_is_refused(archive) -> None:
    section = {"warmup": {**WARMUP, "batch_sizes": [1, 2]}}
    with pytest.raises(ModelLoadError, match=r"takes no batch of 2.*dynamic_shapes"):
        program(archive, lambda p: exported(p, example=1), section, batch_size=2)


def test_a_program_of_training_mode_is_said_to_be_unverified(archive, caplog) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)).train()
    with caplog.at_level(logging.WARNING):
        _, handler = program(archive, lambda p: exported(p, example=1, model=model))
    assert "training mode" in worker_of(handler).report.to_dict()["verify"]["skipped"]
    assert "is not verified" in caplog.text and "not verified" in worker_of(handler).report.summary_line()
    assert "NOT VERIFIED" in worker_of(handler).report.to_text()


def test_without_inputs_the_report_says_that_nothing_was_verified(archive) -> None:
    _, handler = served(archive, {}, weights=save_weights)
    assert "warmup.inputs" in worker_of(handler).report.to_dict()["verify"]["skipped"]


def test_required_verification_refuses_to_start_without_it(archive) -> None:
    with pytest.raises(VerificationError, match=r"verify.required is not met.*warmup.inputs"):
        served(archive, {"verify": {"required": True}}, weights=save_weights)


def test_outputs_that_no_kernel_writes_are_found_before_ready(archive, monkeypatch) -> None:
    """What is left in the memory may be a right answer, so that comparisons fill it with NaN first."""
    right = ov.InferRequest.infer

    def infer(request, *args, **kwargs):
        outputs = [request.get_output_tensor(i).data for i in range(len(request.model_outputs))]
        before = [output.copy() for output in outputs]
        result = right(request, *args, **kwargs)
        for output, old in zip(outputs, before, strict=True):
            if np.isnan(old).all():
                output[...] = old
        return result

    monkeypatch.setattr(ov.InferRequest, "infer", infer)
    with pytest.raises(VerificationError, match="NaN at different positions"):
        served(archive, KNOWN, weights=save_weights)


NAMES = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 8)
    def forward(self, x):
        self.body(x)
        return None
"""


def test_an_answer_that_holds_nothing_is_not_verified(archive) -> None:
    weights = {"body.weight": torch.ones(8, 4), "body.bias": torch.ones(8)}
    files = {"model_file": NAMES, "weights": lambda path: torch.save(weights, path)}
    _, handler = served(archive, KNOWN, **files)
    report = worker_of(handler).report
    assert "no tensors, numbers or texts" in report.to_dict()["verify"]["skipped"] and not report.verified
    with pytest.raises(VerificationError, match=r"verify.required is not met: eager's answer holds no tensors"):
        served(archive, {**KNOWN, "verify": {"required": True}}, **files)


CHANGING = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 8)
        self.register_buffer("calls", torch.zeros(1))
    def forward(self, x):
        {line}
        return self.body(x)
"""


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        ("x = x + torch.rand_like(x)", None),
        ("self.calls += 1; x = x + self.calls", None),
        ("self.calls += 1", None),
        ("x *= 0.5", "batch 1"),
    ],
)
def test_a_health_check_changes_nothing_and_tells_what_changes_from_what_is_wrong(archive, line, sample) -> None:
    weights = {"body.weight": torch.ones(8, 4), "body.bias": torch.ones(8), "calls": torch.zeros(1)}
    files = {"model_file": CHANGING.format(line=line), "weights": lambda path: torch.save(weights, path)}
    _, handler = served(archive, KNOWN, **files)
    worker = worker_of(handler)
    calls = handler.eager_model.calls.clone()
    for _ in range(2):
        assert worker.health.check() == {"healthy": True, "sample": sample, "verified": True}
    assert torch.equal(handler.eager_model.calls, calls)


def test_required_verification_refuses_training_mode(archive) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)).train()
    section = {**KNOWN, "verify": {"required": True}}
    with pytest.raises(VerificationError, match="training mode"):
        program(archive, lambda p: exported(p, example=1, model=model), section)


def test_required_and_off_exclude_each_other(archive) -> None:
    with pytest.raises(RuntimeError, match="exclude each other"):
        served(archive, {"verify": {"required": True, "against": "off"}}, weights=save_weights)


# --- metrics ------------------------------------------------------------------------------------------------


def test_counters_are_there_at_zero_from_ready_on(archive, caplog) -> None:
    with caplog.at_level(logging.INFO):
        served(archive, KNOWN, weights=save_weights)
    names = yaml.safe_load(METRICS.read_text())["model_metrics"]["counter"]
    generators = {"openvino_tokens_total", "openvino_prefix_hit_tokens_total", "openvino_guessed_tokens_total"}
    for name in {counter["name"] for counter in names if counter["name"].startswith("openvino_")} - generators:
        values = sent(caplog, name)
        assert values and all(value == "0" for value, _ in values), name
    kinds = {labels.split(",")[0] for _, labels in sent(caplog, "openvino_fallbacks_total")}
    assert kinds == {f"kind:{kind}" for kind in FALLBACK_KINDS}


def test_gauges_carry_worker_and_version(archive, caplog, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["worker.py", "--sock-type", "unix", "--sock-name", "/tmp/.ts.sock.9003"])
    made = archive(weights=save_weights)
    made.manifest["model"]["modelVersion"] = "2.1"
    with caplog.at_level(logging.INFO):
        TensorHandler().initialize(made.context)
    for name in ("openvino_coverage_ratio", "openvino_verified", "openvino_backend"):
        ((value, labels),) = set(sent(caplog, name))
        assert float(value) == 1.0 and "worker:9003,version:2.1" in labels


# --- refused requests ---------------------------------------------------------------------------------------

HTTP, LOST = {"explain": "False"}, {"data": {"content-type": ""}}


def test_a_refusal_is_raised_where_a_status_can_not_travel(archive) -> None:
    made, handler = served(archive, KNOWN, weights=save_weights)
    with pytest.raises(PredictionException, match="UnsupportedMediaTypeError: the body is neither") as raised:
        made.handle_with(handler, ["no numbers"], [LOST])
    assert raised.value.error_code == 415
    assert handler.describe_handle()["serving"]["counts"]["refused_415"] == 1


def test_a_batch_with_such_a_refusal_fails_as_one_that_may_be_sent_again(archive) -> None:
    made, handler = served(archive, KNOWN, weights=save_weights, batch_size=2)
    with pytest.raises(PredictionException, match="send yours again") as raised:
        made.handle_with(handler, [ROWS, "no numbers"], [HTTP, LOST])
    assert raised.value.error_code == 503


def test_a_bad_http_request_fails_alone(archive) -> None:
    made, handler = served(archive, KNOWN, weights=save_weights, batch_size=2)
    answers = made.handle_with(handler, [ROWS, "no numbers"], [LOST, HTTP])
    assert made.status(0) == 200 and made.status(1) == 415 and answers[1]["code"] == 415


class Painter(BaseHandler):
    """Answers with pictures; a bad item fails the whole batch."""

    def preprocess(self, data):
        return torch.zeros(len(data), 4)

    def handle(self, data, context):
        if any(row["body"] == "bad" for row in data) and len(data) > 1:
            raise ValueError("stops all")
        for index, row in enumerate(data):
            context.set_response_content_type(index, f"image/{row['body']}")
        return [b"pixels" for _ in data]


class OurPainter(tov.OpenVINOHandler, Painter):
    pass


def test_content_types_that_a_handler_sets_are_kept(archive) -> None:
    made = archive({"handler": {"openvino": KNOWN}}, weights=save_weights, batch_size=3)
    handler = OurPainter()
    handler.initialize(made.context)
    assert made.handle(handler, "png", "gif") == [b"pixels", b"pixels"]
    types = [made.context.get_response_content_type(index) for index in range(2)]
    assert types == ["image/png", "image/gif"]
    # Run one by one, each item has index 0 in the handler.
    made.handle(handler, "png", "bad", "gif")
    types = [made.context.get_response_content_type(index) for index in range(3)]
    assert types == ["image/png", "image/bad", "image/gif"]


# --- declared inputs ----------------------------------------------------------------------------------------

MASKED = """
import torch
class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 3)
    def forward(self, input_ids, attention_mask, token_type_ids=None):
        rows = self.table(input_ids) * attention_mask.unsqueeze(-1)
        return rows.sum(1) if token_type_ids is None else rows.sum(1) + token_type_ids.sum(1, keepdim=True)
"""
TOKENS = [
    {"name": "input_ids", "shape": [4], "dtype": "int64", "low": 0, "high": 10},
    {"name": "attention_mask", "shape": [4], "dtype": "int64", "mask": True},
]


def test_a_mask_of_a_fixed_length_takes_padded_requests(archive) -> None:
    """As a comment in model-config/cpu-latency.yaml states."""
    made, handler = served(archive, {"warmup": {"inputs": TOKENS}}, model_file=MASKED)
    assert worker_of(handler).report.to_dict()["verify"]["value_sets"]["kinds"]["padded left"] == 1
    padded = {"inputs": {"input_ids": [[1, 2, 0, 0]], "attention_mask": [[1, 1, 0, 0]]}}
    plain = {"inputs": {"input_ids": [[1, 2, 3, 4]]}}
    answers = made.handle(handler, padded, plain)
    assert [made.status(i) for i in range(2)] == [200, 200]
    weights = worker_of(handler).eager_model.table.weight.detach()
    torch.testing.assert_close(torch.tensor(answers[0]), weights[[1, 2]].sum(0, keepdim=True))


def test_an_input_that_the_declaration_lacks_is_a_fault_of_the_server(archive) -> None:
    made, handler = served(archive, {"warmup": {"inputs": TOKENS}}, model_file=MASKED)
    known = {"inputs": {"input_ids": [[1, 2, 3, 4]], "token_type_ids": [[0, 0, 0, 1]]}}
    (answer,) = made.handle(handler, known)
    assert made.status(0) == 500
    assert "Add {name: token_type_ids, shape: [4], dtype: int64}" in answer["message"]
    made.handle(handler, {"inputs": {"input_ids": [[1, 2, 3, 4]], "no_input": [[0]]}})
    assert made.status(0) == 400


def test_json_that_is_nested_too_deep_is_a_bad_request(archive) -> None:
    made, handler = served(archive, KNOWN, weights=save_weights)
    (answer,) = made.handle(handler, b"[" * 10_000 + b"]" * 10_000)
    assert made.status(0) == 400 and "nested" in answer["message"]


# --- load errors name their cause ---------------------------------------------------------------------------


class SetsNoModel(BaseHandler):
    def initialize(self, context):
        self.initialized = True


class SetsAFunction(BaseHandler):
    def initialize(self, context):
        self.model = lambda x: x


class LoadsItself(BaseHandler):
    """As TorchServe's own examples do: reads weights from --extra-files in `initialize`."""

    def initialize(self, context):
        assert "serializedFile" not in context.manifest["model"]
        self.model = network()
        self.model.load_state_dict(torch.load(f"{context.system_properties['model_dir']}/extra.bin"))
        self.device = torch.device("cpu")


class ReadsTheName(BaseHandler):
    def initialize(self, context):
        assert context.manifest["model"]["serializedFile"] == "model.pt2"
        super().initialize(context)
        assert self.model_pt_path.endswith("model.pt2") and context.manifest["model"]["serializedFile"] == "model.pt2"


def ours(theirs):
    return type(f"Our{theirs.__name__}", (tov.OpenVINOHandler, theirs), {})()


@pytest.mark.parametrize(
    ("theirs", "message"), [(SetsNoModel, "sets no self.model"), (SetsAFunction, r"to a function.*enable: false")]
)
def test_a_handler_without_a_module_is_refused(archive, theirs, message) -> None:
    made = archive({"handler": {"openvino": KNOWN}}, model_file=None)
    with pytest.raises(ModelLoadError, match=message):
        ours(theirs).initialize(made.context)


def test_an_archive_without_model_or_weights_is_refused_by_our_own_handlers(archive) -> None:
    made = archive({"handler": {"openvino": KNOWN}}, model_file=None)
    with pytest.raises(ModelLoadError, match="neither a model file"):
        TensorHandler().initialize(made.context)


def test_a_handler_may_load_weights_by_itself(archive) -> None:
    made = archive({"handler": {"openvino": KNOWN}}, model_file=None)
    save_weights(f"{made.context.system_properties['model_dir']}/extra.bin")
    handler = ours(LoadsItself)
    handler.initialize(made.context)
    assert worker_of(handler).report.summary.coverage == 1.0 and worker_of(handler).report.verified


def test_a_handler_finds_the_real_name_of_the_weights(archive) -> None:
    made = archive(
        {"handler": {"openvino": KNOWN}}, model_file=None, weights=lambda p: exported(p, largest=8),
        weights_name="model.pt2",
    )  # fmt: skip
    handler = ours(ReadsTheName)
    handler.initialize(made.context)
    assert worker_of(handler).report.summary.coverage == 1.0


HALF = NETWORK.replace("torch.nn.Linear(8, 3)", "torch.nn.Linear(8, 3)\n        self.half()")


@pytest.mark.parametrize(
    ("model_file", "inputs", "message"),
    [
        (HALF, [{"shape": [4]}], r"does not take the inputs.*the weights are float16"),
        (MASKED, [{**TOKENS[0], "high": 9999}, TOKENS[1]], r"index out of range.*vocabulary"),
        (NETWORK, [{"shape": [5]}], r"x \[batch, 5\] float32.*shapes cannot be multiplied"),
    ],
)
def test_inputs_that_eager_refuses_are_named_at_load(archive, model_file, inputs, message) -> None:
    with pytest.raises(ModelLoadError, match=message):
        served(archive, {"warmup": {"inputs": inputs}}, model_file=model_file)


class Batch(collections.UserDict):
    """Like transformers' BatchEncoding: a mapping that is not a dict."""


class Tokenizes(BaseHandler):
    def preprocess(self, data):
        ids = torch.tensor([[1, 2, 3, 4]] * len(data))
        return Batch(input_ids=ids, attention_mask=torch.ones_like(ids))

    def inference(self, data):
        return self.model(**data)

    def postprocess(self, data):
        return data.tolist()


def test_a_sample_may_become_a_batch_encoding(archive) -> None:
    made = archive({"handler": {"openvino": {"warmup": {"samples": ["s.txt"]}}}}, model_file=MASKED)
    with open(f"{made.context.system_properties['model_dir']}/s.txt", "w") as file:
        file.write("words")
    handler = ours(Tokenizes)
    handler.initialize(made.context)
    assert worker_of(handler).report.verified and len(made.handle(handler, "words")[0]) == 3


def test_the_cause_is_one_line_before_a_short_traceback(archive, caplog) -> None:
    made = archive({"handler": {"openvino": {"wormup": {}, "freze": 1}}}, weights=save_weights)
    with pytest.raises(RuntimeError) as raised:
        TensorHandler().initialize(made.context)
    (line,) = [r.getMessage() for r in caplog.records if "is not served" in r.getMessage()]
    assert line.startswith("ERROR: net is not served. ") and "\n" not in line and "wormup" in line
    frames = traceback.format_exception(raised.value)
    assert raised.value.__suppress_context__ and len(frames) <= 6


def test_any_other_error_is_named_too(archive, caplog) -> None:
    class Fails(BaseHandler):
        def initialize(self, context):
            raise KeyError("my own")

    with pytest.raises(KeyError):
        ours(Fails).initialize(archive(weights=save_weights).context)
    assert "ERROR: net is not served. KeyError: 'my own'" in caplog.text


def test_random_weights_are_warned_about(archive, caplog) -> None:
    served(archive, KNOWN)
    assert "No weights were packaged" in caplog.text
    caplog.clear()
    served(archive, KNOWN, weights=save_weights)
    assert "No weights were packaged" not in caplog.text
