"""The user's object stays the user's: its attributes, its methods and their order, by mixin and by `wrap`."""

import importlib
import json
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from own_handlers import BODY, NET, Plain, X, weights
from ts.torch_handler.base_handler import BaseHandler

import torchserve_openvino as tov
from encoder import build
from torchserve_openvino.tasks.tensor import TensorHandler

# Attributes that public handlers set on themselves, and those that this package had set before.
NAMES = """
answer_items batch_size buckets cache class_names classes compilable config context_length counters data_dir describe
device_type eager_model envelope features freezes handle_envelope hooks index_to_label initialize_time labels loaded
loaded_model lock logger max_length metrics mixin mode model_dir model_name models overrides own_code path pipeline
precision prepare processor properties quantized queue ready report run_sample sample_inputs seen servable served
service session settings shapes state stats summary threads tokenizer tracker transform version warmup_inputs watched
worker wraps
""".split()
VALUES = {"text": "mine", "number": 7, "mapping": {"a": [1]}, "nothing": None}
# Attributes of BaseHandler, and methods of it that are put on the object so that they are watched.
THEIRS = {*vars(BaseHandler()), "model_yaml_config"} | {"initialize", "preprocess", "inference", "postprocess"}

STEPS = """
import torch
from ts.torch_handler.base_handler import BaseHandler

class Theirs(BaseHandler):
    def preprocess(self, data):
        return torch.tensor([[float(v) for v in row["body"].decode().split(",")] for row in data])
"""
SETS = f"""{STEPS}
    NAMES = {NAMES!r}

    def __init__(self):
        self.before = [name for name in self.NAMES if hasattr(self, name)]
        super().__init__()
        for name in self.NAMES[::2]:
            setattr(self, name, VALUE)

    def initialize(self, context):
        for name in self.NAMES[1::2]:
            assert not hasattr(self, name), name
            setattr(self, name, VALUE)
        super().initialize(context)
        self.model_dir = str(context.system_properties.get("model_dir"))

    def postprocess(self, data):
        self.counters = VALUE
        return data.tolist()
"""


def serve(
    archive: Any, by: str, source: str, *, kind: str = "Theirs", body: bytes = BODY, model: str | None = NET,
    save: Callable[[Path], Any] = weights, batch_size: int = 2, name: str = "weights.pth", **section: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Serves a handler's source file, as it is, with the mixin in front of its class or by `wrap`."""
    module = f"users_{zlib.crc32(source.encode())}_{by}"

    def write(path: Path) -> None:
        save(path)
        (path.parent / f"{module}.py").write_text(source)
        (path.parent / "sample.bin").write_bytes(body)

    own = {"warmup": {"samples": ["sample.bin"]}, **section} | ({"wrap": f"{module}.py"} if by == "wrap" else {})
    config = {"handler": {"openvino": own}}
    made = archive(config, model_file=model, weights=write, weights_name=name, batch_size=batch_size)
    if by == "wrap":
        handler: Any = TensorHandler()
    else:
        theirs = getattr(importlib.import_module(module), kind)
        handler = type("Mine", (tov.OpenVINOHandler, theirs), {})()
    # TorchServe takes this before it loads the model.
    entry = handler.handle
    handler.initialize(made.context)
    made.handle = lambda handler, *bodies, handle=made.handle, **headers: handle(_Entry(entry), *bodies, **headers)
    return made, handler


class _Entry:
    """TorchServe's entry point, in the place of the handler."""

    def __init__(self, handle: Callable[..., Any]) -> None:
        self.handle = handle


def right(answer: Any, change: float = 1.0) -> None:
    with torch.no_grad():
        expected = build(NET, "Network")(X.unsqueeze(0))[0] * change
    torch.testing.assert_close(torch.tensor(answer), expected, rtol=1e-4, atol=1e-5)


def proven(handler: Any) -> dict[str, Any]:
    report = handler.describe_handle()
    assert report["verify"]["passed"] and report["summary"]["coverage"] == 1.0 and not report["fallbacks"]
    assert report["serving"]["compiles_after_ready"] == 0
    return report


@pytest.mark.quick("mixin-text", "wrap-mapping")
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("by", ["mixin", "wrap"])
def test_every_name_is_the_users(archive, by, value) -> None:
    source = SETS.replace("VALUE", repr(VALUES[value]))
    made, handler = serve(archive, by, source)
    for _ in range(2):
        answers = made.handle(handler, BODY, BODY)
        assert made.status(0) == made.status(1) == 200
        for answer in answers:
            right(answer)
    proven(handler)
    assert handler.before == [] and len(NAMES) >= 50
    own = {name: getattr(handler, name) for name in NAMES}
    assert own == dict.fromkeys(NAMES, VALUES[value]) | {"model_dir": own["model_dir"]}
    assert isinstance(own["model_dir"], str)
    assert set(vars(handler)) - THEIRS - set(NAMES) - {"before"} == {"_openvino"}


@pytest.mark.parametrize("by", ["mixin", "wrap"])
def test_every_name_may_be_a_method_or_an_attribute_of_the_users_class(archive, by) -> None:
    methods = "".join(f"    def {name}(self, *args):\n        raise AssertionError('{name}')\n" for name in NAMES[::2])
    values = "".join(f"    {name} = 'mine'\n" for name in NAMES[1::2])
    made, handler = serve(archive, by, f"{STEPS}\n{methods}{values}")
    right(made.handle(handler, BODY)[0])
    proven(handler)


class OwnTask(TensorHandler):
    """A task that sets what public handlers set; each name is also one that the worker keeps."""

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        self.config, self.model_dir, self.counters = {"top_k": 3}, "models", 0
        self.loaded = self.served = self.state = self.report = self.eager_model = None


def test_a_tasks_subclass_has_every_name_too(archive) -> None:
    section = {"warmup": {"inputs": [{"shape": [len(X)]}], "batch_sizes": [1, 2]}}
    made = archive({"handler": {"openvino": section}}, model_file=NET, weights=weights, batch_size=2)
    handler = OwnTask()
    handler.initialize(made.context)
    for answer in made.handle(handler, [X.tolist()], [X.tolist()]):
        right(answer[0])
    assert made.status(0) == 200 and handler.config == {"top_k": 3} and handler.served is None
    proven(handler)


LOADS = f"""{STEPS}
    def _load_pickled_model(self, model_dir, model_file, model_pt_path):
        assert model_pt_path.endswith("weights.pth")
        model = CALL(model_dir, model_file, model_pt_path)
        with torch.no_grad():
            model.head.weight.mul_(3), model.head.bias.mul_(3)
        return model
"""


@pytest.mark.parametrize("call", ["super()._load_pickled_model", "BaseHandler._load_pickled_model"])
@pytest.mark.parametrize("by", ["mixin", "wrap"])
def test_a_handler_may_change_the_model_that_base_handler_loads(archive, by, call) -> None:
    call = f"{call}(self, " if call.startswith("Base") else f"{call}("
    made, handler = serve(archive, by, LOADS.replace("CALL(", call))
    right(made.handle(handler, BODY)[0], 3.0)
    proven(handler)


PROGRAM = f"""{STEPS}
    def _load_torchscript_model(self, model_pt_path):
        assert model_pt_path == self.model_pt_path and model_pt_path.endswith("net.pt2"), model_pt_path
        assert self.manifest["model"]["serializedFile"] == "net.pt2"

        class Scaled(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner
            def forward(self, x):
                return self.inner(x) * 3
        return Scaled(super()._load_torchscript_model(model_pt_path))
"""


@pytest.mark.parametrize("by", ["mixin", "wrap"])
def test_a_handler_may_change_the_program_that_base_handler_loads(archive, by) -> None:
    def save(path: Path) -> None:
        batch = torch.export.Dim("batch")
        example = torch.zeros(2, 4)
        program = torch.export.export(build(NET, "Network").eval(), (example,), dynamic_shapes=({0: batch},))
        torch.export.save(program, path)

    made, handler = serve(archive, by, PROGRAM, model=None, save=save, name="net.pt2")
    right(made.handle(handler, BODY)[0], 3.0)
    proven(handler)


# Each method of BaseHandler that runs in an archive with a model file; with a request that makes it run.
HOOKS = {
    "initialize": {}, "_load_pickled_model": {}, "preprocess": {}, "inference": {}, "postprocess": {}, "handle": {},
    "_is_explain": {}, "_is_describe": {}, "explain_handle": {"explain": "True"},
    "describe_handle": {"describe": "True"},
}  # fmt: skip
# `get_device` is called by nobody; programs of AOTInductor are refused.
NOT_RUN = {"get_device", "_use_torch_export_aot_compile", "_load_torch_export_aot_compile", "_load_torchscript_model"}


def overriding(names: Any) -> str:
    methods = "".join(
        f"    def {name}(self, *args, **kwargs):\n        CALLED.append('{name}')\n"
        f"        return super().{name}(*args, **kwargs)\n"
        for name in names
    )
    steps = STEPS.replace("class Theirs", "class Reads").replace(
        "data])", "data])\n    def get_insights(self, data, raw, target):\n        return [raw.decode()]"
    )
    # A handler's file has one class of its own.
    return f"{steps}\nReads.__module__ = 'elsewhere'\nCALLED = []\nclass Theirs(Reads):\n{methods or '    pass'}"


def module_of(handler: Any) -> Any:
    """Returns the module of the user's class, which follows this package's."""
    theirs = next(each for each in type(handler).__mro__[1:] if not each.__module__.startswith("torchserve_openvino."))
    return importlib.import_module(theirs.__module__)


@pytest.mark.parametrize("below", [False, True], ids=["a base", "a subclass"])
def test_every_override_of_a_base_handlers_method_runs(archive, below) -> None:
    names = {name for name, value in vars(BaseHandler).items() if callable(value) and not name.startswith("__")}
    assert names - NOT_RUN == {*HOOKS, "_infer_with_profiler"}
    source = overriding(HOOKS)
    made, handler = serve(archive, "mixin", source if not below else overriding([]) + "\n# below")
    called: list[str] = module_of(handler).CALLED
    if below:

        def noting(name: str) -> Callable[..., Any]:
            def method(self, *args, **kwargs):
                called.append(name)
                return getattr(super(kind, self), name)(*args, **kwargs)

            return method

        kind = type("Below", (type(handler),), {name: noting(name) for name in HOOKS})
        handler = kind()
        entry = handler.handle
        handler.initialize(made.context)
        made.handle = lambda handler, *bodies, **headers: made.handle_with(
            _Entry(entry), bodies, [{"explain": "False", **headers} for _ in bodies]
        )
    assert {"initialize", "_load_pickled_model"} <= set(called)
    for name, headers in HOOKS.items():
        called.clear()
        answer = made.handle(handler, BODY, **headers)
        if not headers:
            right(answer[0])
        assert made.status(0) == 200 and (name in called or name in {"initialize", "_load_pickled_model"}), name
        assert called.count("handle") <= 1, "an override that calls its base's handle does not start over"


def test_every_override_runs_by_wrap(archive) -> None:
    source = overriding(HOOKS) + "\n# wrap"
    made, handler = serve(archive, "wrap", source)
    module = module_of(handler)
    for headers in ({}, {"explain": "True"}, {"describe": "True"}):
        made.handle(handler, BODY, **headers)
    assert set(module.CALLED) == set(HOOKS)


def test_a_handle_below_the_mixin_is_isolated_and_counted(archive) -> None:
    class Below(Plain):
        def handle(self, data, context):
            return [{"mine": each} for each in super().handle(data, context)]

    made, handler = serve(archive, "mixin", STEPS)
    handler = Below()
    entry = _Entry(handler.handle)
    handler.initialize(made.context)
    good, bad = made.handle_with(entry, [BODY, b"x"], [{"explain": "False"}] * 2)
    right(good["mine"])
    assert made.status(1) == 500 and "could not convert" in bad["message"]
    assert handler.describe_handle()["serving"]["counts"]["requests"] == 2


DESCRIBES = f"""{STEPS}
    def describe_handle(self):
        return {{"labels": ["a"], "summary": "mine"}}
"""


@pytest.mark.parametrize("by", ["mixin", "wrap"])
def test_what_a_handler_describes_is_beside_the_report(archive, by) -> None:
    made, handler = serve(archive, by, DESCRIBES)
    (report,) = made.handle(handler, BODY, describe="True")
    assert report["labels"] == ["a"] and report["handler"] == {"labels": ["a"], "summary": "mine"}
    assert report["summary"]["coverage"] == 1.0


FREE = """
import torch
class Free:
    def __init__(self):
        self.seen = 0
    def initialize(self, context):
        from pathlib import Path
        import importlib
        folder = Path(context.system_properties["model_dir"])
        (model,) = [each for each in vars(importlib.import_module(
            context.manifest["model"]["modelFile"][:-3])).values() if isinstance(each, type)]
        self.model = model()
        self.model.load_state_dict(torch.load(folder / "weights.pth"))
        self.model.eval()
    def preprocess(self, data):
        self.seen += len(data)
        return torch.tensor([[float(v) for v in row["body"].decode().split(",")] for row in data])
    def inference(self, data):
        return self.model(data)
    def postprocess(self, data):
        return data.detach().tolist()
    def handle(self, data, context):
        return self.postprocess(self.inference(self.preprocess(data)))
"""


@pytest.mark.parametrize("by", ["mixin", "wrap"])
def test_a_class_that_is_no_base_handler_keeps_its_methods(archive, by) -> None:
    made, handler = serve(archive, by, FREE, kind="Free")
    seen = handler.seen
    right(made.handle(handler, BODY)[0])
    assert handler.seen == seen + 1
    proven(handler)


def test_torchserves_densenet_handler_keeps_its_methods(archive) -> None:
    from ts.torch_handler.densenet_handler import DenseNetHandler

    body = BytesIO()
    torch.save(X, body)
    made, _ = serve(archive, "mixin", STEPS + "# for the archive", batch_size=1)
    (Path(made.context.system_properties["model_dir"]) / "sample.bin").write_bytes(body.getvalue())
    handler = type("Mine", (tov.OpenVINOHandler, DenseNetHandler), {})()
    handler.initialize(made.context)
    (answer,) = made.handle_with(_Entry(handler.handle), [body.getvalue()], [{"explain": "False"}])
    right(answer[0].detach().tolist())
    proven(handler)


PROPERTY = f"""{STEPS}
    @property
    def model(self):
        return self.__dict__.get("_theirs")

    @model.setter
    def model(self, value):
        self._theirs = value
"""


@pytest.mark.parametrize("by", ["mixin", "wrap"])
def test_the_model_may_be_a_property(archive, by) -> None:
    made, handler = serve(archive, by, PROPERTY)
    right(made.handle(handler, BODY)[0])
    proven(handler)


def test_an_init_that_passes_nothing_on_is_enough(archive) -> None:
    made, handler = serve(archive, "mixin", f"{STEPS}\n    def __init__(self):\n        self.device = None\n")
    right(made.handle(handler, BODY)[0])
    proven(handler)


def test_the_report_of_a_handler_is_json(archive) -> None:
    _, handler = serve(archive, "mixin", f"{STEPS}\n# json")
    json.dumps(handler.describe_handle())
