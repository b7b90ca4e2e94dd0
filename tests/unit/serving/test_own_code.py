"""What a handler's own code computes is compiled where possible, and counted where it is not."""

import asyncio
import copy
import io
import logging
import time

import own_handlers
import pytest
import torch
from own_handlers import (
    BODY,
    COMPILE,
    OTHER,
    TEXT,
    Autocast,
    Container,
    Explains,
    ListOnly,
    Method,
    Micro,
    MicroParts,
    Nested,
    NoGrad,
    Parts,
    Plain,
    Second,
    Text,
    Weights,
    WithGrad,
    X,
    eager_answer,
    report_of,
    save_text,
    start,
)
from serving_worker import WARMUP, sent
from torch import nn
from ts.context import RequestProcessor

from torchserve_openvino.errors import ModelLoadError, VerificationError
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tasks.tensor import TensorHandler


@pytest.mark.parametrize("handler_class", [NoGrad, WithGrad, Autocast])
def test_declared_inputs_are_compiled_in_the_modes_of_the_handler(archive, handler_class) -> None:
    made, handler = start(archive, handler_class, sample=False, warmup=WARMUP, batch_size=2)
    expected = eager_answer(handler_class, handler, OTHER, BODY)
    got = made.handle(handler, OTHER, BODY)
    tolerance = 0.02 if handler_class is Autocast else 1e-4
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=tolerance, rtol=tolerance)
    report, _ = report_of(handler)
    assert report["serving"]["compiles_after_ready"] == 0, report["recompiles"]


@pytest.mark.parametrize("handler_class", [Parts, Second, NoGrad, WithGrad, Autocast])
def test_what_a_sample_shows_is_compiled_for_every_batch_and_nothing_compiles_later(archive, handler_class) -> None:
    made, handler = start(archive, handler_class, batch_size=4)
    expected = eager_answer(handler_class, handler, OTHER, BODY, OTHER)
    for count in (1, 3, 4, 2):
        got = made.handle(handler, *[OTHER, BODY, OTHER, BODY][:count])
        tolerance = 0.02 if handler_class is Autocast else 1e-4
        torch.testing.assert_close(
            torch.tensor(got[:3]), torch.tensor(expected[:count]), atol=tolerance, rtol=tolerance
        )
    report, outside = report_of(handler)
    assert not outside and report["summary"]["coverage"] == 1.0
    assert report["serving"]["compiles_after_ready"] == 0, report["recompiles"]
    assert report["serving"]["policy"]["holds"]


def test_parts_are_named_in_the_report_and_verified(archive) -> None:
    _, handler = start(archive, Parts)
    report = handler.describe_handle()
    assert set(report["serving"]["shapes"]["parts"]) == {"model.encoder", "model.head"}
    assert {path: part["passed"] for path, part in report["verify"]["parts"].items()} == {
        "model.encoder": True,
        "model.head": True,
    }
    assert any("no sample calls self.model itself" in note for note in report["notes"])
    assert "parts" in report["verify"] and worker_of(handler).report.verified


def test_without_samples_eager_parts_are_counted_with_line_time_and_advice(archive, caplog) -> None:
    caplog.set_level(logging.INFO)
    made, handler = start(archive, Parts, sample=False, warmup=WARMUP)
    before = handler.describe_handle()["summary"]["coverage"]
    made.handle(handler, BODY)
    made.handle(handler, OTHER)
    report, outside = report_of(handler)
    assert set(outside) == {"model.encoder", "model.head"} and before == 1.0
    entry = outside["model.encoder"]
    line = Parts.inference.__code__.co_firstlineno + 2
    assert entry["where"].endswith(f"{own_handlers.__file__}:{line}") and entry["count"] == 2 and entry["seconds"] > 0
    assert f"{COMPILE}: [model.encoder]" in entry["reason"] and entry["to"] == "eager"
    assert report["summary"]["coverage"] < 1.0 and report["summary"]["fallbacks"] == 4
    fallbacks = sent(caplog, "openvino_fallbacks_total")
    assert sum(int(value) for value, labels in fallbacks if "kind:outside_compiled" in labels) == 4


def test_parts_that_the_configuration_names_are_compiled(archive) -> None:
    made, handler = start(archive, Parts, sample=False, warmup=WARMUP, compile=["model.encoder", "self.model.head"])
    expected = eager_answer(Parts, handler, OTHER)
    torch.testing.assert_close(torch.tensor(made.handle(handler, OTHER)), torch.tensor(expected))
    report, outside = report_of(handler)
    # No sample shows their inputs, so they are compiled at the first request, which is counted.
    assert not outside and report["serving"]["compiles_after_ready"] > 0


def test_a_method_is_counted_and_its_calls_are_compiled_where_the_model_is_named(archive) -> None:
    made, handler = start(archive, Method, warmup=WARMUP)
    made.handle(handler, BODY)
    _, outside = report_of(handler)
    assert set(outside) == {"model.twice"} and f"{COMPILE}: [model]" in outside["model.twice"]["reason"]
    made, handler = start(archive, Method, compile=["model"])
    expected = eager_answer(Method, handler, OTHER)
    torch.testing.assert_close(torch.tensor(made.handle(handler, OTHER)), torch.tensor(expected))
    report, outside = report_of(handler)
    assert not outside and report["summary"]["coverage"] == 1.0 and report["serving"]["compiles_after_ready"] == 0


TWO_INPUTS = own_handlers.NET.replace("def forward(self, x):", "def forward(self, x, y):").replace(
    "(x))", "(x)) + y.sum(-1, keepdim=True)"
)


class Twice(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model(data, data)


class Expanded(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model(data, data[:, :1].expand(-1, 4))


class Transposed(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model(data, data.reshape(2, 2).T)[:1]


@pytest.mark.parametrize("kind", [Twice, Expanded, Transposed])
def test_the_graph_that_was_verified_is_the_one_that_serves(archive, kind) -> None:
    # Dynamo compiles anew where two inputs are the same tensor, or lie in memory in another way.
    made, handler = start(archive, kind, model=TWO_INPUTS)
    (found,) = made.handle(handler, BODY)
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(eager_answer(kind, handler, BODY)[0]), rtol=1e-4, atol=1e-5
    )
    report = worker_of(handler).report
    assert report.verified and report.summary.graphs == 1 and report.summary.recompiles == 0


class Encoder(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model.encoder(data)


def test_a_part_that_no_sample_calls_is_not_verified(archive) -> None:
    _, handler = start(archive, Encoder, compile=["model.encoder"])
    # The whole model, which nobody calls, does not count.
    assert worker_of(handler).report.verified
    both = ["model.encoder", "model.head"]
    _, handler = start(archive, Encoder, compile=both)
    report = worker_of(handler).report
    assert not report.verified and "no sample" in report.to_dict()["verify"]["parts"]["model.head"]["skipped"]
    with pytest.raises(VerificationError, match="verify.required is not met: no sample shows a call"):
        start(archive, Encoder, compile=both, verify={"required": True})


def test_explanations_have_gradients_of_the_eager_model_and_are_counted(archive) -> None:
    made, handler = start(archive, Explains)
    (got,) = made.handle(handler, BODY, explain="True")
    rows = torch.tensor([[float(v) for v in BODY.decode().split(",")]], requires_grad=True)
    worker_of(handler).eager_model(rows).sum().backward()
    torch.testing.assert_close(torch.tensor([got]), rows.grad)
    _, outside = report_of(handler)
    assert "model" in outside
    answer = made.handle(handler, BODY)
    torch.testing.assert_close(torch.tensor(answer), torch.tensor(eager_answer(Plain, handler, BODY)))


def test_a_handler_that_forgets_no_grad_is_served_without_gradients(archive) -> None:
    made, handler = start(archive, WithGrad)
    made.handle(handler, BODY)
    stages = {graph["stage"] for graph in handler.describe_handle()["graphs"]}
    assert stages == {"inference"}


class Decodes(TensorHandler):
    """A task with a step of its own, which computes with a part of the model."""

    def decode(self, item):
        self.model.encoder(torch.zeros(1, len(X)))
        return super().decode(item)


class DecodesInThreads(Decodes):
    decodes_in_parallel = True


class Joins(TensorHandler):
    def together(self, values):
        self.model.encoder(torch.zeros(1, len(X)))
        return super().together(values)


@pytest.mark.parametrize("handler_class", [Decodes, DecodesInThreads, Joins])
def test_the_steps_of_a_task_are_watched(archive, handler_class) -> None:
    made, handler = start(archive, handler_class, sample=False, warmup=WARMUP, batch_size=2)
    made.handle(handler, [X.tolist()], [X.tolist()])
    _, outside = report_of(handler)
    assert set(outside) == {"model.encoder"}
    assert outside["model.encoder"]["count"] == (1 if handler_class is Joins else 2)
    assert __file__ in outside["model.encoder"]["where"]
    made, handler = start(
        archive, handler_class, sample=False, warmup=WARMUP, fallback={"allow": [], "on_violation": "refuse"}
    )
    made.handle(handler, [X.tolist()])
    assert made.status(0) == 503


def test_an_operator_on_weights_is_counted(archive) -> None:
    made, handler = start(archive, Weights)
    made.handle(handler, BODY)
    _, outside = report_of(handler)
    (entry,) = outside.values()
    assert entry["where"].startswith(own_handlers.__file__) and "move that into the model's forward" in entry["reason"]


def test_the_policy_holds_for_it(archive) -> None:
    fallback = {"allow": [], "on_violation": "refuse"}
    with pytest.raises(RuntimeError, match=r"outside_compiled: model.twice"):
        start(archive, Method, fallback=fallback)
    made, handler = start(archive, Method, sample=False, warmup=WARMUP, fallback=fallback)
    made.handle(handler, BODY)
    assert made.status(0) == 503
    report, _ = report_of(handler)
    assert not report["serving"]["policy"]["holds"]
    with pytest.raises(RuntimeError, match=r"coverage"):
        start(archive, Method, fallback={"min_coverage": 0.9, "on_violation": "refuse"})


def test_nested_inputs_and_flags_are_compiled_for_every_batch(archive) -> None:
    model = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(4, 3)
    def forward(self, inputs, flag=False):
        first, (second,) = inputs["more"]
        x = inputs["x"] + first * second
        return self.last(x) if flag else x
"""

    def save(path) -> None:
        torch.manual_seed(0)
        made = nn.Linear(4, 3)
        torch.save({"last.weight": made.weight, "last.bias": made.bias}, path)

    made, handler = start(archive, Nested, batch_size=3, model=model, save=save)
    expected = eager_answer(Nested, handler, OTHER, BODY, OTHER)
    for count in (3, 1, 2):
        got = made.handle(handler, *[OTHER, BODY, OTHER][:count])
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected[:count]))
    report, outside = report_of(handler)
    assert not outside and report["serving"]["compiles_after_ready"] == 0


def test_micro_batching_keeps_its_threads_and_our_counts(archive) -> None:
    made, handler = start(archive, Micro, batch_size=4)
    try:
        expected = eager_answer(Plain, handler, OTHER, BODY, OTHER)
        got = made.handle(handler, OTHER, BODY, OTHER)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected))
        report, outside = report_of(handler)
        assert not outside and report["serving"]["compiles_after_ready"] == 0
        assert report["serving"]["counts"]["items"] == 3
    finally:
        worker_of(handler).own_handle.shutdown()


def test_eager_computation_in_the_threads_of_micro_batching_is_counted(archive) -> None:
    made, handler = start(archive, MicroParts, sample=False, warmup=WARMUP, batch_size=4)
    try:
        made.handle(handler, OTHER, BODY, OTHER)
        assert {f["op"]: f["count"] for f in handler.describe_handle()["fallbacks"]} == {
            "model.encoder": 2,
            "model.head": 2,
        }
    finally:
        worker_of(handler).own_handle.shutdown()


def test_a_sample_that_is_not_answered_keeps_the_model_from_loading(archive) -> None:
    class Breaks(Plain):
        def inference(self, data, *args, **kwargs):
            raise KeyError("labels")

    with pytest.raises(ModelLoadError, match=r"does not answer the sample sample.txt: KeyError: 'labels'"):
        start(archive, Breaks)


def test_an_unknown_path_is_refused_with_the_nearest_name(archive) -> None:
    with pytest.raises(ModelLoadError, match=r"'model.encodr', but self.model has no 'encodr'.*'encoder'"):
        start(archive, Parts, compile=["model.encodr"])
    with pytest.raises(ModelLoadError, match="which is a str, not a torch.nn.Module"):
        start(archive, Parts, compile=["model.__module__"])


def test_a_list_of_models_is_served_where_something_tells_what_is_called(archive) -> None:
    made, handler = start(archive, ListOnly)
    report, outside = report_of(handler)
    assert not outside and report["summary"]["coverage"] == 1.0 and report["summary"]["ops_total"] == 5
    encoder, head = handler.model
    expected = head._call_impl(encoder._call_impl(torch.tensor([[0.5, -2, 3, 0.25]])))
    torch.testing.assert_close(torch.tensor(made.handle(handler, OTHER)), expected.detach())
    with pytest.raises(ModelLoadError, match=r"sets self.model to a list.*name the modules in it"):
        start(archive, ListOnly, sample=False)


def test_the_model_behaves_as_the_module_it_stands_for(archive) -> None:
    _, handler = start(archive, Plain)
    model, eager = handler.model, worker_of(handler).eager_model
    assert isinstance(model, nn.Module) and isinstance(model, type(eager)) and model is not eager
    assert model.encoder is eager.encoder and model.eval() is model and model.float() is model
    assert dict(model.named_parameters()).keys() == dict(eager.named_parameters()).keys()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in eager.named_modules()]
    parent = nn.Module()
    parent.inner = model
    assert parent.state_dict().keys() == {f"inner.{name}" for name in eager.state_dict()}
    parent.to(torch.float32), parent.eval()
    model.extra = 5
    assert eager.extra == 5 and model.extra == 5
    del model.extra
    assert not hasattr(eager, "extra") and not hasattr(model, "nothing")
    assert model.forward(X[None]).shape == (1, 3) and bool(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    with pytest.raises(TypeError):
        len(model)
    torch.testing.assert_close(copy.copy(model)(X[None]), model(X[None]))


def test_a_module_dict_is_a_container_and_its_modules_are_compiled(archive) -> None:
    made, handler = start(archive, Container)
    assert list(handler.model) == ["encoder", "head"] and len(handler.model) == 2 and "head" in handler.model
    expected = eager_answer(Container, handler, OTHER)
    torch.testing.assert_close(torch.tensor(made.handle(handler, OTHER)), torch.tensor(expected))
    report, outside = report_of(handler)
    assert not outside and set(report["serving"]["shapes"]["parts"]) == {"model.encoder", "model.head"}


def test_a_handler_that_computes_nothing_by_itself_is_left_alone(archive) -> None:
    made, handler = start(archive, Plain)
    made.handle(handler, BODY)
    report, outside = report_of(handler)
    assert not outside and report["summary"]["fallbacks"] == 0


def test_texts_of_any_length_share_one_graph_that_is_compiled_before_ready(archive) -> None:
    made, handler = start(archive, Text, batch_size=4, model=TEXT, save=save_text)
    for length in (2, 3, 5, 17, 40, 41, 99):
        for count in (1, 2, 3, 4):
            bodies = [",".join(str(n % 5) for n in range(length - k % 2)).encode() for k in range(count)]
            got = made.handle(handler, *bodies)
            torch.testing.assert_close(torch.tensor(got), torch.tensor(eager_answer(Text, handler, *bodies)))
    report, outside = report_of(handler)
    assert report["serving"]["compiles_after_ready"] == 0 and not outside


def test_beyond_max_shapes_one_graph_serves_all(archive) -> None:
    model = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
    def forward(self, x):
        return (x * self.scale).exp().sum(1, keepdim=True)
"""
    made, handler = start(
        archive, NoGrad, model=model, save=lambda path: torch.save({"scale": torch.ones(1)}, path),
        batching={"max_shapes": 3},
    )  # fmt: skip
    compiled = []
    for length in range(5, 25):
        body = ",".join("0.5" for _ in range(length)).encode()
        got = made.handle(handler, body)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(eager_answer(NoGrad, handler, body)))
        compiled.append(handler.describe_handle()["serving"]["compiles_after_ready"])
    # Two shapes after the sample's, then one graph for all others.
    assert compiled[-1] == compiled[4] == 3


def test_explanations_without_weights_are_refused(archive) -> None:
    made, handler = start(archive, NoGrad, sample=False, warmup=WARMUP, freeze=True, release_weights=True)
    assert worker_of(handler).served.released
    (answer,) = made.handle(handler, BODY, explain="True")
    assert made.status(0) == 501 and "release_weights" in answer["message"]


class Describes(Plain):
    def describe_handle(self):
        return {"labels": ["a"]}


class DescribesMore(Plain):
    def describe_handle(self):
        return {**super().describe_handle(), "labels": ["a"]}


@pytest.mark.parametrize("handler_class", [Describes, DescribesMore])
def test_the_report_is_beside_what_a_subclass_describes(archive, handler_class) -> None:
    made, handler = start(archive, handler_class)
    (report,) = made.handle(handler, BODY, describe="True")
    assert report["labels"] == ["a"] and report["summary"]["coverage"] == 1.0
    assert ("handler" in report) is (handler_class is Describes)


class Turns(Plain):
    """Refuses one request by its context, some time after it was read."""

    def preprocess(self, data):
        tensor = super().preprocess(data)
        time.sleep(0.3)
        if data[0]["body"] == OTHER:
            self.context.set_response_status(418, "I'm a teapot", 0)
        return tensor


def test_requests_in_flight_together_have_contexts_of_their_own(archive, sockets) -> None:
    """As where TorchServe awaits the handler (`asyncCommunication`)."""
    made, handler = start(archive, Turns)
    bodies, contexts = [BODY, OTHER, BODY], []
    for number in range(len(bodies)):
        context = copy.copy(made.context)
        context.request_processor, context.request_ids = [RequestProcessor({"explain": "False"})], {0: f"id-{number}"}
        context.cl_socket = sockets[0]
        contexts.append(context)

    async def answered() -> None:
        await asyncio.gather(
            *(handler.handle([{"body": body}], context) for body, context in zip(bodies, contexts, strict=True))
        )

    asyncio.run(answered())
    assert [context.get_response_status(0)[0] for context in contexts] == [200, 418, 200]
