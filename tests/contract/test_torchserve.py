"""Pins the behavior of TorchServe 0.12 that this package uses or works around."""

import importlib
import inspect
import json
import logging
import struct
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from ts.context import Context, RequestProcessor
from ts.metrics.dimension import Dimension
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.metrics.metric_type_enum import MetricTypes
from ts.model_loader import TsModelLoader
from ts.model_service_worker import TorchModelServiceWorker
from ts.service import Service
from ts.torch_handler.base_handler import BaseHandler
from ts.torch_handler.request_envelope.base import BaseEnvelope
from ts.torch_handler.request_envelope.json import JSONEnvelope
from ts.torch_handler.request_envelope.kserve import KServeEnvelope
from ts.utils.util import check_valid_pt2_backend, load_label_mapping

MODEL = "import torch\nclass Double(torch.nn.Module):\n    def forward(self, x):\n        return 2 * x\n"
STOCK_METRICS = Path(inspect.getfile(MetricsCacheYamlImpl)).parents[1] / "configs" / "metrics.yaml"


@pytest.fixture
def module_dir(tmp_path, monkeypatch):
    """A folder whose modules can be imported during the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture
def metrics():
    cache = MetricsCacheYamlImpl(config_file_path=str(STOCK_METRICS))
    cache.initialize_cache()
    cache.model_name = "m"
    cache.set_request_ids("r")
    return cache


def context_for(model_dir, yaml_config, name="double"):
    (model_dir / f"{name}.py").write_text(MODEL)
    manifest = {"model": {"modelName": "m", "modelFile": f"{name}.py"}}
    return Context("m", str(model_dir), manifest, 1, None, "0.12.0", model_yaml_config=yaml_config)


# --- base_handler -------------------------------------------------------------------------------------------


def test_base_handler_deletes_enable_out_of_the_shared_config(module_dir):
    config = {"pt2": {"compile": {"enable": True, "backend": "eager"}}}
    BaseHandler().initialize(context_for(module_dir, config))
    assert config == {"pt2": {"compile": {"backend": "eager"}}}


def test_base_handler_swallows_a_failed_compile(module_dir, monkeypatch, caplog):
    def refuse(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    handler = BaseHandler()
    with caplog.at_level(logging.WARNING):
        handler.initialize(context_for(module_dir, {"pt2": {"compile": {"enable": True, "backend": "openvino"}}}))
    assert handler.initialized
    assert type(handler.model).__name__ == "Double"
    assert "Proceeding without compilation" in caplog.text


@pytest.mark.parametrize(
    "compile_section",
    [
        {"enable": "true", "backend": "eager"},
        {"enable": True, "backend": "opnvino"},
    ],
    ids=["enable as a string", "misspelt backend"],
)
def test_base_handler_serves_eager_without_an_error(module_dir, monkeypatch, compile_section):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it compiled"))
    handler = BaseHandler()
    handler.initialize(context_for(module_dir, {"pt2": {"compile": compile_section}}))
    assert type(handler.model).__name__ == "Double"


def test_a_string_under_pt2_names_the_backend_and_no_pt2_means_no_compile(module_dir, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: seen.append(options) or model)
    BaseHandler().initialize(context_for(module_dir, {"pt2": "openvino"}))
    BaseHandler().initialize(context_for(module_dir, {"pt2": {"backend": "openvino", "dynamic": False}}))
    BaseHandler().initialize(context_for(module_dir, {"minWorkers": 1}))
    assert seen == [{"backend": "openvino"}, {"backend": "openvino", "dynamic": False}]


def test_only_torchserves_own_list_of_backends_is_valid_to_it():
    assert check_valid_pt2_backend("openvino")
    assert not check_valid_pt2_backend("openvino_serving")


def test_initialize_takes_the_config_from_the_context(module_dir):
    config = {"handler": {"openvino": {}}}
    handler = BaseHandler()
    handler.initialize(context_for(module_dir, config))
    assert handler.model_yaml_config is config


def test_weights_load_without_weights_only_being_named():
    assert "weights_only" not in inspect.getsource(BaseHandler._load_pickled_model)


def test_a_pt_without_a_model_file_is_taken_for_torchscript():
    source = inspect.getsource(BaseHandler.initialize)
    assert 'endswith(".pt")' in source
    assert "_load_torchscript_model" in source


def test_describe_goes_through_handle_by_a_request_header():
    class Describing(BaseHandler):
        def describe_handle(self):
            return {"coverage": 1.0}

    context = Context("m", "", {}, 1, None, "0.12.0")
    context.metrics = type("Metrics", (), {"add_time": lambda *_: None})()
    context.request_processor = [RequestProcessor({"describe": "True"})]
    assert Describing().handle([{}], context) == [{"coverage": 1.0}]


def test_labels_may_be_names_or_lists_that_end_in_names(tmp_path):
    path = tmp_path / "index_to_name.json"
    path.write_text(json.dumps({"0": ["n01440764", "tench"], "1": "goldfish"}))
    assert load_label_mapping(str(path)) == {"0": "tench", "1": "goldfish"}


# --- the handler file ---------------------------------------------------------------------------------------


def load_classes(module_dir, name, source):
    (module_dir / f"{name}.py").write_text(source)
    return TsModelLoader()._get_class_entry_point(importlib.import_module(name))


def test_a_handler_file_defines_exactly_one_class_and_imported_ones_do_not_count(module_dir):
    one = "from ts.torch_handler.base_handler import BaseHandler\nclass One(BaseHandler): pass\n"
    entry_point, initialize = load_classes(module_dir, "one_class", one)
    assert type(entry_point.__self__).__name__ == "One"
    assert initialize.__name__ == "initialize"
    with pytest.raises(ValueError, match="Expected only one class"):
        load_classes(module_dir, "two_classes", one + "class Two: pass\n")
    with pytest.raises(ValueError, match="Expected only one class"):
        load_classes(module_dir, "no_class", "from ts.torch_handler.base_handler import BaseHandler\n")


def test_a_function_called_handle_in_the_handler_file_hides_its_class(module_dir):
    (module_dir / "hiding.py").write_text(
        "class One:\n    def initialize(self, context): raise AssertionError\n"
        "def handle(data, context): return ['function']\n"
    )
    service = TsModelLoader().load("m", str(module_dir), "hiding.py", batch_size=1)
    assert service._entry_point([], None) == ["function"]


def test_the_handler_is_a_file_or_a_built_in_name_not_a_dotted_module():
    with pytest.raises(ModuleNotFoundError):
        TsModelLoader()._load_default_handler("torchserve_openvino.entrypoints.tensor")


def load_through_worker(module_dir, exception):
    name = f"raises_{exception.lower()}"
    (module_dir / f"{name}.py").write_text(
        f"class One:\n    def initialize(self, context): raise {exception}('reason')\n"
        "    def handle(self, data, context): return data\n"
    )
    worker = object.__new__(TorchModelServiceWorker)
    worker.metrics_cache = MetricsCacheYamlImpl(config_file_path=str(STOCK_METRICS))
    request = {"modelPath": str(module_dir), "modelName": "m", "handler": f"{name}.py", "batchSize": "1"}
    return worker.load_model({key: value.encode() for key, value in request.items()})


def test_a_runtime_error_of_initialize_is_logged_and_answered(module_dir, caplog):
    with caplog.at_level(logging.ERROR):
        assert load_through_worker(module_dir, "RuntimeError") == (None, "Unknown exception", 500)
    assert "Failed to load model m, exception reason" in caplog.text


def test_any_other_error_of_initialize_leaves_the_worker_to_die(module_dir):
    with pytest.raises(ValueError, match="reason"):
        load_through_worker(module_dir, "ValueError")


# --- one batch ----------------------------------------------------------------------------------------------


class Socket:
    """Stands in for the worker's connection, which Service.predict only passes on."""


def predict(entry_point, count, metrics):
    service = Service("m", "", None, entry_point, None, count, metrics_cache=metrics)
    service.set_cl_socket(Socket())
    batch = [{"requestId": f"r{index}".encode(), "parameters": []} for index in range(count)]
    return service.predict(batch)


def test_one_exception_makes_the_whole_batch_503(metrics):
    def fail(*_):
        raise ValueError("the second item is bad")

    answer = predict(fail, 2, metrics)
    assert struct.unpack("!i", answer[:4]) == (503,)
    assert b"the second item is bad" not in answer


def test_set_response_status_answers_one_item_alone(metrics):
    def one_bad(data, context):
        context.set_response_status(400, "Bad Request", 1)
        return [{"fine": True}, {"code": 400}]

    answer = bytes(predict(one_bad, 2, metrics))
    assert struct.unpack("!i", answer[:4]) == (200,)
    first, second = answer.split(b"r1")
    assert struct.pack("!i", 200) in first.split(b"r0")[1]
    assert struct.pack("!i", 400) + struct.pack("!i", len("Bad Request")) + b"Bad Request" in second


def test_the_answer_must_be_a_list_as_long_as_the_batch(metrics):
    assert struct.unpack("!i", predict(lambda *_: [1], 2, metrics)[:4]) == (503,)
    assert struct.unpack("!i", predict(lambda *_: (1, 2), 2, metrics)[:4]) == (503,)


# --- metrics ------------------------------------------------------------------------------------------------


def test_the_default_dimensions_are_one_list_for_all_calls(metrics):
    shared = inspect.signature(MetricsCacheYamlImpl.add_counter).parameters["dimensions"].default
    metrics.add_counter("a", 1)
    assert [dimension.name for dimension in shared] == ["ModelName", "Level"]
    metrics.model_name = "another"
    metrics.add_counter("b", 1)
    assert [dimension.value for dimension in shared] == ["m", "Model"]
    shared.clear()


def test_a_list_of_dimensions_that_is_passed_gets_two_more(metrics):
    own = [Dimension("kind", "graph_break")]
    metrics.add_counter("c", 1, dimensions=own)
    assert [dimension.name for dimension in own] == ["kind", "ModelName", "Level"]


def test_there_is_no_add_gauge_and_no_add_histogram_but_add_metric_takes_a_type(metrics):
    assert not hasattr(metrics, "add_gauge")
    assert not hasattr(metrics, "add_histogram")
    assert {member.value for member in MetricTypes} == {"counter", "gauge", "histogram"}
    metrics.add_metric("d", 0.5, "ratio", dimensions=[], metric_type=MetricTypes.GAUGE)
    assert metrics.get_metric("d", MetricTypes.GAUGE).unit == "ratio"


def test_a_metric_travels_as_a_log_line(metrics, caplog):
    with caplog.at_level(logging.INFO, logger="ts.metrics.caching_metric"):
        metrics.add_metric("e", 2, "count", dimensions=[], metric_type=MetricTypes.GAUGE)
    assert "[METRICS]e.Count:2|#ModelName:m,Level:Model|#type:GAUGE" in caplog.text


def test_dimensions_other_than_those_of_the_yaml_are_dropped_with_an_error(metrics, caplog):
    metrics.add_metric_to_cache("f", "count", ["ModelName", "Level"], MetricTypes.COUNTER)
    with caplog.at_level(logging.INFO, logger="ts.metrics.caching_metric"):
        metrics.add_counter("f", 1, dimensions=[Dimension("kind", "x")])
    assert "Failed to update metric with name:f" in caplog.text
    assert "[METRICS]f" not in caplog.text


# --- packaging ----------------------------------------------------------------------------------------------


def test_the_wheel_does_not_name_what_it_imports():
    named = {text.split()[0].lower() for text in metadata.requires("torchserve") if "extra" not in text}
    assert named == {"pillow", "psutil", "packaging", "wheel"}


def test_its_vision_handlers_import_torchvision_and_captum():
    handlers = Path(inspect.getfile(BaseHandler)).parent
    assert "from captum" in (handlers / "vision_handler.py").read_text()
    assert "from torchvision import" in (handlers / "image_classifier.py").read_text()


# --- envelopes, and the end of a worker ---------------------------------------------------------------------


def test_a_handler_is_made_before_its_envelope_and_initialized_after(module_dir):
    """Why `serving/requests/envelopes.py` can replace an envelope's methods from the handler's __init__."""
    (module_dir / "ordered.py").write_text(
        "import ts.torch_handler.request_envelope.json as j\n"
        "EVENTS = []\n"
        "class Ordered:\n"
        "    def __init__(self):\n"
        "        EVENTS.append('made')\n"
        "        before = j.JSONEnvelope.__init__\n"
        "        def note(self, fn):\n"
        "            EVENTS.append('wrapped')\n"
        "            before(self, fn)\n"
        "        self._undo = (j.JSONEnvelope, before)\n"
        "        j.JSONEnvelope.__init__ = note\n"
        "    def initialize(self, context):\n"
        "        EVENTS.append('initialized')\n"
        "        self._undo[0].__init__ = self._undo[1]\n"
        "    def handle(self, data, context):\n"
        "        return data\n"
    )
    TsModelLoader().load("m", str(module_dir), "ordered.py", None, 1, "json", True, None)
    assert sys.modules["ordered"].EVENTS == ["made", "wrapped", "initialized"]


@pytest.mark.parametrize("name", ["json", "kserve", "kservev2"])
def test_envelopes_share_one_handle_and_keep_the_handlers_bound_method(name):
    module = importlib.import_module(f"ts.torch_handler.request_envelope.{name}")
    (envelope,) = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, BaseEnvelope) and c is not BaseEnvelope
    ]
    assert inspect.getsource(BaseEnvelope.handle).count("parse_input") == 1
    handler = BaseHandler()
    assert envelope(handler.handle)._handle_fn.__self__ is handler


def test_upstreams_json_envelope_fails_a_whole_batch_for_one_bad_request():
    with pytest.raises(KeyError):
        JSONEnvelope(lambda data, context: data).parse_input([{"body": {"instances": [1]}}, {"body": {}}])


def test_upstreams_kserve_envelope_reads_the_first_request_of_a_batch_only():
    opened = KServeEnvelope(None).parse_input([{"body": {"instances": [1, 2]}}, {"body": {"instances": [3]}}])
    assert opened == [1, 2]


def test_a_handler_can_end_its_worker_in_the_middle_of_a_call():
    """Why `serving/ready.py` raises SystemExit, and where it finds the connection."""

    def handle(data, context):
        raise SystemExit(1)

    metrics = MetricsCacheYamlImpl(config_file_path=str(STOCK_METRICS))
    service = Service("m", ".", None, handle, None, 1, metrics_cache=metrics)
    service.set_cl_socket("the connection")
    with pytest.raises(SystemExit):
        service.predict([{"requestId": b"1", "parameters": [], "headers": []}])
    assert service.context.cl_socket == "the connection"
    assert "set_cl_socket" in inspect.getsource(TorchModelServiceWorker.handle_connection)


def test_base_handler_imports_the_stock_backend_and_ours_does_not():
    """Why `serving/torchserve/base.py` imports BaseHandler without it: this saves each worker the import of Dynamo."""
    assert "import openvino.torch" in inspect.getsource(sys.modules[BaseHandler.__module__])
    code = "import torchserve_openvino.tasks.tensor, sys; print('torch._dynamo' in sys.modules)"
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False" and "OpenVINO is not enabled" not in said.stderr
