"""What a handler's own code computes: compiled where it can be, counted where it is not, never neither."""

import copy
import io

import pytest
import torch
from serving_worker import WARMUP
from torch import nn
from ts.handler_utils.micro_batching import MicroBatching

from torchserve_openvino import OpenVINOHandler
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.base import BaseHandler

X = torch.linspace(-1, 1, 4)
NET = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 3)
    def forward(self, x):
        return self.head(self.encoder(x))
    def twice(self, x):
        return self(x) + self(x)
    def scaled(self, x):
        return x @ self.head.weight
"""
COMPILE = "handler.openvino.compile"


def weights(path) -> None:
    """Of `NET`."""
    space: dict = {}
    exec(NET, space)
    torch.manual_seed(0)
    torch.save(space["Network"]().state_dict(), path)


class Plain(OpenVINOHandler, BaseHandler):
    """Takes a list of numbers."""

    def preprocess(self, data):
        return torch.tensor([[float(v) for v in row["body"].decode().split(",")] for row in data])

    def postprocess(self, data):
        return data.tolist()


class Parts(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            hidden = self.model.encoder(data)
            return self.model.head(hidden)


class Method(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model.twice(data)


class Weights(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model(data) + torch.nn.functional.linear(data, self.model.encoder[0].weight[:3])


class Second(Plain):
    """Two models, one of them in a list."""

    def _load_pickled_model(self, *args):
        model = super()._load_pickled_model(*args)
        torch.manual_seed(1)
        self.others = [nn.Linear(3, 2).eval()]
        return model

    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.others[0](self.model(data))


class NoGrad(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model(data)


class WithGrad(Plain):
    def inference(self, data, *args, **kwargs):
        return self.model(data)

    def postprocess(self, data):
        return data.detach().tolist()


class Autocast(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(data).float()


class Nested(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.inference_mode():
            return self.model({"x": data, "more": (data, [data])}, flag=True)


class Micro(Plain):
    def __init__(self):
        super().__init__()
        self.handle = MicroBatching(self, micro_batch_size=2)


BODY = ",".join(str(float(v)) for v in X).encode()
OTHER = b"0.5,-2,3,0.25"


def start(archive, handler_class, *, sample=True, batch_size=1, model=NET, save=weights, **section):
    folder_of = []

    def write(path) -> None:
        save(path)
        if sample:
            (path.parent / "sample.txt").write_bytes(BODY)
        folder_of.append(path.parent)

    own = {"warmup": {"samples": ["sample.txt"]} if sample else {}, **section}
    made = archive({"handler": {"openvino": own}}, model_file=model, weights=write, batch_size=batch_size)
    handler = handler_class()
    handler.initialize(made.context)
    return made, handler


def eager_answer(handler_class, made_handler, *bodies):
    """The same handler without this package, on the same model."""
    one = object.__new__(handler_class)
    vars(one).update(
        model=made_handler.eager_model, others=getattr(made_handler, "others", None), context=made_handler.context,
        device=made_handler.device,
    )  # fmt: skip
    data = handler_class.preprocess(one, [{"body": body} for body in bodies])
    return handler_class.postprocess(one, handler_class.inference(one, data))


def report_of(handler):
    report = handler.describe_handle()
    return report, {f["op"]: f for f in report["fallbacks"] if f["kind"] == "outside_compiled"}


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
    assert "parts" in report["verify"] and handler.report.verified


def test_without_samples_eager_parts_are_counted_with_line_time_and_advice(archive) -> None:
    made, handler = start(archive, Parts, sample=False, warmup=WARMUP)
    before = handler.describe_handle()["summary"]["coverage"]
    made.handle(handler, BODY)
    made.handle(handler, OTHER)
    report, outside = report_of(handler)
    assert set(outside) == {"model.encoder", "model.head"} and before == 1.0
    entry = outside["model.encoder"]
    line = Parts.inference.__code__.co_firstlineno + 2
    assert entry["where"].endswith(f"{__file__}:{line}") and entry["count"] == 2 and entry["seconds"] > 0
    assert f"{COMPILE}: [model.encoder]" in entry["reason"] and entry["to"] == "eager"
    assert report["summary"]["coverage"] < 1.0 and report["summary"]["fallbacks"] == 4
    assert made.metric("openvino_fallbacks_total") is not None


def test_parts_that_the_configuration_names_are_compiled(archive) -> None:
    made, handler = start(archive, Parts, sample=False, warmup=WARMUP, compile=["model.encoder", "self.model.head"])
    expected = eager_answer(Parts, handler, OTHER)
    torch.testing.assert_close(torch.tensor(made.handle(handler, OTHER)), torch.tensor(expected))
    report, outside = report_of(handler)
    # Nobody said with what they are called: that is honest, and not eager.
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


class Explains(Plain):
    def get_insights(self, data, raw, target):
        rows = data.requires_grad_()
        self.model(rows).sum().backward()
        return rows.grad.tolist()


def test_explanations_have_gradients_of_the_eager_model_and_are_counted(archive) -> None:
    made, handler = start(archive, Explains)
    (got,) = made.handle(handler, BODY, explain="True")
    rows = torch.tensor([[float(v) for v in BODY.decode().split(",")]], requires_grad=True)
    handler.eager_model(rows).sum().backward()
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


def test_an_operator_on_weights_is_counted(archive) -> None:
    made, handler = start(archive, Weights)
    made.handle(handler, BODY)
    _, outside = report_of(handler)
    (entry,) = outside.values()
    assert entry["where"].startswith(__file__) and "move that into the model's forward" in entry["reason"]


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


def test_micro_batching_keeps_its_threads_and_our_books(archive) -> None:
    made, handler = start(archive, Micro, batch_size=4)
    try:
        expected = eager_answer(Plain, handler, OTHER, BODY, OTHER)
        got = made.handle(handler, OTHER, BODY, OTHER)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected))
        report, outside = report_of(handler)
        assert not outside and report["serving"]["compiles_after_ready"] == 0
        assert report["serving"]["counts"]["items"] == 3
    finally:
        handler._own_handle.shutdown()


class MicroParts(Micro):
    inference = Parts.inference


def test_eager_computation_in_the_threads_of_micro_batching_is_counted(archive) -> None:
    made, handler = start(archive, MicroParts, sample=False, warmup=WARMUP, batch_size=4)
    try:
        made.handle(handler, OTHER, BODY, OTHER)
        assert {f["op"]: f["count"] for f in handler.describe_handle()["fallbacks"]} == {
            "model.encoder": 2,
            "model.head": 2,
        }
    finally:
        handler._own_handle.shutdown()


def test_a_sample_that_is_not_answered_keeps_the_model_from_loading(archive) -> None:
    class Breaks(Plain):
        def inference(self, data, *args, **kwargs):
            raise KeyError("labels")

    with pytest.raises(ModelLoadError, match=r"does not answer the sample sample.txt: KeyError: 'labels'"):
        start(archive, Breaks)


def test_a_path_that_is_not_there_is_told_with_the_nearest(archive) -> None:
    with pytest.raises(ModelLoadError, match=r"'model.encodr', but self.model has no 'encodr'.*'encoder'"):
        start(archive, Parts, compile=["model.encodr"])
    with pytest.raises(ModelLoadError, match="which is a str, not a torch.nn.Module"):
        start(archive, Parts, compile=["model.__module__"])


class ListOnly(Plain):
    def initialize(self, context):
        super().initialize(context)

    def loaded_model(self):
        model = super().loaded_model()
        self.model = [model.encoder, model.head]
        return self.model

    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            for each in self.model:
                data = each(data)
            return data


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
    model, eager = handler.model, handler.eager_model
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
    assert copy.copy(model.encoder)


class Container(Plain):
    def _load_pickled_model(self, *args):
        model = super()._load_pickled_model(*args)
        return nn.ModuleDict({"encoder": model.encoder, "head": model.head})

    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model["head"](self.model["encoder"](data))


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


TEXT = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
    def forward(self, ids, mask):
        hidden = self.first(self.embed(ids)).relu() * mask[..., None]
        return self.last(hidden.sum(1) / mask.sum(1, keepdim=True))
"""


def save_text(path) -> None:
    space: dict = {}
    exec(TEXT, space)
    torch.manual_seed(0)
    torch.save(space["Network"]().state_dict(), path)


class Text(Plain):
    """Pads the requests of a batch to the longest."""

    def preprocess(self, data):
        rows = [[int(float(v) * 10) % 50 for v in row["body"].decode().split(",")] for row in data]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in rows])
        return {"ids": ids, "mask": mask.long()}

    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model(**data)


def test_texts_of_any_length_share_one_graph_that_is_compiled_before_ready(archive) -> None:
    made, handler = start(archive, Text, batch_size=4, model=TEXT, save=save_text)
    for length in (2, 3, 5, 17, 40, 41, 99):
        for count in (1, 2, 3, 4):
            bodies = [",".join(str(n % 5) for n in range(length - k % 2)).encode() for k in range(count)]
            got = made.handle(handler, *bodies)
            torch.testing.assert_close(torch.tensor(got), torch.tensor(eager_answer(Text, handler, *bodies)))
    report, outside = report_of(handler)
    assert report["serving"]["compiles_after_ready"] == 0 and not outside


class Sum(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model(data)


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
        archive, Sum, model=model, save=lambda path: torch.save({"scale": torch.ones(1)}, path),
        batching={"max_shapes": 3},
    )  # fmt: skip
    compiled = []
    for length in range(5, 25):
        body = ",".join("0.5" for _ in range(length)).encode()
        got = made.handle(handler, body)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(eager_answer(Sum, handler, body)))
        compiled.append(handler.describe_handle()["serving"]["compiles_after_ready"])
    # The sample's shape, two more, and the graph of all others.
    assert compiled[-1] == compiled[4] == 3
