"""A worker's life cycle in this process: what loads, what is refused, and what users can see."""

import copy
import logging
import os
import re

import pytest
import torch
from serving_worker import NETWORK, ROWS, WARMUP, close, expected, network, save_weights, sent
from torch import nn
from ts.torch_handler.base_handler import BaseHandler

import torchserve_openvino as tov
from torchserve_openvino.errors import ModelLoadError, PolicyViolationError, VerificationError
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tasks.tensor import TensorHandler


def save_safetensors(path) -> None:
    from safetensors.torch import save_file

    save_file(network().state_dict(), path)


def save_nested(path) -> None:
    torch.save({"state_dict": network().state_dict(), "epoch": 3}, path)


@pytest.mark.parametrize(
    ("name", "write"),
    [("w.pth", save_weights), ("w.pt", save_weights), ("w.safetensors", save_safetensors), ("w.bin", save_nested)],
)
def test_weights_in_every_format(archive, name, write) -> None:
    made = archive(weights=write, weights_name=name)
    handler = TensorHandler()
    handler.initialize(made.context)
    close(made.handle(handler, ROWS)[0])
    assert worker_of(handler).report.summary.coverage == 1.0 and handler.initialized


def test_an_exported_program_needs_no_model_file(archive) -> None:
    def write(path) -> None:
        batch = torch.export.Dim("batch", min=1, max=8)
        program = torch.export.export(network(), (torch.zeros(2, 4),), dynamic_shapes=({0: batch},))
        torch.export.save(program, path)

    made = archive(model_file=None, weights=write, weights_name="model.pt2")
    handler = TensorHandler()
    handler.initialize(made.context)
    close(made.handle(handler, ROWS)[0])
    assert worker_of(handler).report.summary.coverage == 1.0


def test_torchscript_is_served_in_eager_where_compilation_is_off(archive) -> None:
    made = archive(
        {"pt2": {"compile": {"enable": False}}},
        model_file=None,
        weights=lambda p: torch.jit.trace(network(), torch.zeros(1, 4)).save(str(p)),
        weights_name="m.pt",
    )
    handler = TensorHandler()
    handler.initialize(made.context)
    close(made.handle(handler, ROWS)[0])


def pickled(path) -> None:
    torch.save(nn.Linear(4, 8), path)


def foreign(path) -> None:
    torch.save({"other.weight": torch.zeros(2)}, path)


@pytest.mark.parametrize(
    ("write", "message"),
    [(pickled, "state_dict"), (foreign, "missing first.bias"), (lambda p: p.write_bytes(b"x"), "w.pth")],
)
def test_unfit_weights_are_refused(archive, write, message) -> None:
    made = archive(weights=write, weights_name="w.pth")
    with pytest.raises(ModelLoadError, match=message):
        TensorHandler().initialize(made.context)


def test_weights_without_a_class_are_refused(archive) -> None:
    made = archive(model_file=None, weights=save_weights)
    with pytest.raises(ModelLoadError, match="--model-file"):
        TensorHandler().initialize(made.context)


def test_two_classes_in_the_model_file_are_refused(archive) -> None:
    made = archive(model_file=NETWORK + "\nclass Helper(torch.nn.Module):\n    pass\n", weights=save_weights)
    with pytest.raises(ModelLoadError, match="exactly one class"):
        TensorHandler().initialize(made.context)


def test_a_misspelt_key_is_a_runtime_error_that_names_the_line(archive) -> None:
    made = archive({"handler": {"openvino": {"wormup": WARMUP}}}, weights=save_weights)
    with pytest.raises(RuntimeError, match=r"model-config.yaml:\d+.*warmup"):
        TensorHandler().initialize(made.context)


@pytest.mark.parametrize(
    "pt2", ["openvino", {"backend": "openvino"}, {"compile": {"enable": True, "backend": "openvino"}}]
)
def test_all_forms_of_pt2_and_the_context_is_not_changed(archive, pt2) -> None:
    config = {"pt2": pt2, "handler": {"openvino": {"warmup": WARMUP}}}
    made = archive(config, weights=save_weights)
    kept_config, kept_manifest = copy.deepcopy(config), copy.deepcopy(made.manifest)
    handler = TensorHandler()
    handler.initialize(made.context)
    assert made.context.model_yaml_config is config and config == kept_config
    assert made.context.manifest is made.manifest and made.manifest == kept_manifest
    assert worker_of(handler).report.summary.coverage == 1.0


def test_other_backends_are_served_and_described(archive) -> None:
    made = archive({"pt2": {"backend": "aot_eager"}, "handler": {"openvino": {"warmup": WARMUP}}}, weights=save_weights)
    handler = TensorHandler()
    handler.initialize(made.context)
    close(made.handle(handler, ROWS)[0])
    assert handler.describe_handle()["config"]["backend"] == "aot_eager"


def test_enable_false_serves_eager_and_says_so(archive) -> None:
    made = archive({"pt2": {"compile": {"enable": False}}}, weights=save_weights)
    handler = TensorHandler()
    handler.initialize(made.context)
    close(made.handle(handler, ROWS)[0])
    described = handler.describe_handle()
    assert described["config"]["backend"] == "none" and described["summary"]["ops_on_openvino"] == 0


def test_describe_returns_the_report(archive) -> None:
    made = archive(weights=save_weights)
    handler = TensorHandler()
    handler.initialize(made.context)
    (report,) = made.handle(handler, ROWS, describe="True")
    assert report["schema"] == 1 and report["pid"] == os.getpid() and report["model"] == "net"
    assert report["summary"]["coverage"] == 1.0 and report["fallbacks"] == []
    assert report["verify"]["passed"] and report["verify"]["max_abs"] < 1e-4
    assert {"load_seconds", "warmup_seconds"} <= report["timings"].keys()


def test_one_summary_line_at_load(archive, caplog) -> None:
    made = archive(weights=save_weights)
    with caplog.at_level(logging.INFO, logger="torchserve_openvino"):
        TensorHandler().initialize(made.context)
    lines = [r.getMessage() for r in caplog.records if "coverage" in r.getMessage()]
    assert (
        len(lines) == 1 and "coverage 100.0%" in lines[0] and "device CPU" in lines[0] and "precision f32" in lines[0]
    )


def test_nothing_compiles_after_ready(archive) -> None:
    made = archive(weights=save_weights, batch_size=4)
    handler = TensorHandler()
    handler.initialize(made.context)
    graphs = worker_of(handler).report.summary.graphs
    for count in (1, 2, 3, 4, 3):
        answers = made.handle(handler, *[[[float(i), 1.0, 2.0, 3.0]] for i in range(count)])
        for i, answer in enumerate(answers):
            close(answer, [[float(i), 1.0, 2.0, 3.0]])
    assert worker_of(handler).report.summary.graphs == graphs == 3
    assert not worker_of(handler).report.fallbacks


def test_a_bad_item_answers_for_itself_alone(archive) -> None:
    made = archive(weights=save_weights, batch_size=4)
    handler = TensorHandler()
    handler.initialize(made.context)
    good = [[1.0, 2.0, 3.0, 4.0]]
    answers = made.handle(handler, ROWS, b"{not json", [[1.0, 2.0]], good)
    assert [made.status(i) for i in range(4)] == [200, 400, 400, 200]
    close(answers[0])
    close(answers[3], good)
    named = {"message": answers[1]["message"], "request_id": "request-1"}
    assert answers[1] == {"code": 400, "type": "InvalidInputError", **named}
    assert "not valid JSON" in answers[1]["message"] and "[1, 2]" in answers[2]["message"]


UNSUPPORTED = NETWORK.replace(
    "return self.last(self.first(x).relu())", "return torch.digamma(self.first(x).relu() + 1)"
)


def test_policy_refuses_and_warns(archive, caplog) -> None:
    def config(action: str) -> dict:
        fallback = {"allow": ["disabled_op"], "min_coverage": 0.99, "on_violation": action}
        return {"handler": {"openvino": {"warmup": WARMUP, "fallback": fallback}}}

    made = archive(config("refuse"), model_file=UNSUPPORTED, weights=save_weights)
    with pytest.raises(PolicyViolationError, match=r"aten.digamma.default.*min_coverage 99.0%"):
        TensorHandler().initialize(made.context)
    made = archive(config("warn"), model_file=UNSUPPORTED, weights=save_weights)
    handler = TensorHandler()
    handler.initialize(made.context)
    assert "aten.digamma.default" in caplog.text and handler.initialized


def test_fallbacks_are_metrics(archive, caplog) -> None:
    made = archive(model_file=UNSUPPORTED, weights=save_weights)
    with caplog.at_level(logging.INFO):
        TensorHandler().initialize(made.context)
    fallbacks = sent(caplog, "openvino_fallbacks_total")
    assert sum(int(value) for value, labels in fallbacks if "kind:unsupported_op" in labels) > 0
    value, _ = sent(caplog, "openvino_coverage_ratio")[-1]
    assert 0 < float(value) < 1


def test_wrong_answers_are_refused(archive, monkeypatch) -> None:
    from torchserve_openvino.backend.runtime.execute import CompiledPartition

    real = CompiledPartition.run
    monkeypatch.setattr(CompiledPartition, "run", lambda self, args: [t + 0.1 for t in real(self, args)])
    made = archive(weights=save_weights)
    with pytest.raises(VerificationError, match="differ from eager"):
        TensorHandler().initialize(made.context)


def test_threads_are_shared_among_workers(archive, monkeypatch) -> None:
    from torchserve_openvino.serving import threads

    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    made = archive({"maxWorkers": 4, "handler": {"openvino": {"warmup": WARMUP}}}, weights=save_weights)
    handler = TensorHandler()
    handler.initialize(made.context)
    config = handler.describe_handle()["config"]
    share = config["options"]["config.INFERENCE_NUM_THREADS"]
    assert share == {"value": 2, "source": "handler.openvino.threads: auto: 8 cores / 4 workers"}
    assert config["options"]["config.ENABLE_CPU_PINNING"]["value"] is False
    # All operators run on OpenVINO, so PyTorch has no parallel work.
    assert torch.get_num_threads() == config["threads"]["torch_threads"] == 1


def test_torch_keeps_its_threads_where_it_has_work(archive, monkeypatch) -> None:
    from torchserve_openvino.serving import threads

    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    for config, model in (({"threads": 3}, NETWORK), ({}, UNSUPPORTED)):
        made = archive({"handler": {"openvino": {"warmup": WARMUP, **config}}}, model_file=model, weights=save_weights)
        handler = TensorHandler()
        handler.initialize(made.context)
        assert torch.get_num_threads() == config.get("threads", 8)


# --- the mixin ----------------------------------------------------------------------------------------------


class Theirs(BaseHandler):
    """A user's handler, written without this package."""

    def initialize(self, context) -> None:
        super().initialize(context)
        self.greeting = "hello"

    def preprocess(self, data):
        return torch.tensor([[float(n) for n in row["body"].decode().split(",")] for row in data])

    def postprocess(self, outputs):
        return [{"greeting": self.greeting, "largest": int(row.argmax())} for row in outputs]


class Mine(tov.OpenVINOHandler, Theirs):
    pass


def test_a_users_handler_keeps_its_steps(archive) -> None:
    made = archive(weights=save_weights)
    handler = Mine()
    handler.initialize(made.context)
    answers = made.handle(handler, b"0.5,-1,2,0.1")
    assert answers == [{"greeting": "hello", "largest": int(expected().argmax())}]
    (report,) = made.handle(handler, b"", describe="True")
    assert report["summary"]["coverage"] == 1.0


def test_a_users_handler_may_change_its_weights(archive) -> None:
    made = archive(weights=save_weights)
    handler = Mine()
    handler.initialize(made.context)
    made.handle(handler, b"0.5,-1,2,0.1")
    with torch.no_grad():
        worker_of(handler).eager_model.last.bias.copy_(torch.tensor([100.0, 0.0, 0.0]))
    assert made.handle(handler, b"0.5,-1,2,0.1")[0]["largest"] == 0


def test_a_users_handler_may_be_frozen(archive) -> None:
    section = {"warmup": WARMUP, "freeze": True, "release_weights": True}
    made = archive({"handler": {"openvino": section}}, weights=save_weights)
    handler = Mine()
    handler.initialize(made.context)
    assert worker_of(handler).served.compiled.frozen == 1 and worker_of(handler).served.released
    assert made.handle(handler, b"0.5,-1,2,0.1")[0]["largest"] == int(expected().argmax())


def test_release_without_frozen_calls_says_that_it_does_nothing(archive) -> None:
    made = archive({"handler": {"openvino": {"warmup": WARMUP, "release_weights": True}}}, weights=save_weights)
    handler = Mine()
    handler.initialize(made.context)
    assert any("freeze" in note for note in handler.describe_handle()["notes"])
    assert made.handle(handler, b"0.5,-1,2,0.1")[0]["largest"] == int(expected().argmax())


def test_advice_where_loading_comes_near_the_timeout(archive, caplog, monkeypatch) -> None:
    from torchserve_openvino.serving.shapes import warmup

    assert warmup.startup_advice(69, 100) is None and "startupTimeout: 205" in (warmup.startup_advice(70.1, 100) or "")
    monkeypatch.setattr(warmup, "SAFE_SHARE", 0.0)
    made = archive({"startupTimeout": 1, "handler": {"openvino": {"warmup": WARMUP}}}, weights=save_weights)
    handler = TensorHandler()
    handler.initialize(made.context)
    assert re.search(r"Set startupTimeout: \d+", caplog.text) and "allows" in caplog.text
    assert any("startupTimeout" in note for note in handler.describe_handle()["notes"])
