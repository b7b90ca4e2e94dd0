"""What the doctor accepts: Python files, exported programs, archives, and inputs in several notations."""

import shutil
from pathlib import Path

import pytest
import torch
from ill_models import WELL, written

from encoder import ENCODER, encoder
from torchserve_openvino.backend.runtime.build import device_capabilities
from torchserve_openvino.cli.handler_path import handlers
from torchserve_openvino.doctor.diagnose import diagnose
from torchserve_openvino.doctor.target import TargetSpec, load_target, parse_inputs
from torchserve_openvino.errors import ConfigError, ModelLoadError, PackagingError
from torchserve_openvino.packaging.archive import run_archiver
from torchserve_openvino.serving.verification.measures import Top1


def test_inputs_are_read_as_written() -> None:
    args, kwargs = parse_inputs(["2,3", "1,8:int64:5..9", "mask=1,8:bool", "scale=scalar:float16"])
    assert [(tuple(t.shape), t.dtype) for t in args] == [((2, 3), torch.float32), ((1, 8), torch.int64)]
    assert int(args[1].min()) >= 5 and int(args[1].max()) < 9
    assert kwargs["mask"].dtype is torch.bool and not kwargs["scale"].shape and kwargs["scale"].dtype is torch.float16
    assert torch.equal(args[0], parse_inputs(["2,3"])[0][0])


@pytest.mark.parametrize("text", ["", "a,b", "1,2:nope", "1,2:int64:9..3", "x=y=1", "1,2:float32:", "-1"])
def test_an_input_that_can_not_be_read_shows_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="--input"):
        parse_inputs([text])


def test_a_factory_is_found_by_its_usual_name_or_named(tmp_path: Path) -> None:
    path = written(
        tmp_path, "factory_file.py", WELL + "\ndef other():\n    return nn.Tanh(), {'input': torch.ones(2)}\n"
    )
    assert isinstance(load_target(TargetSpec(path)).model, torch.nn.Sequential)
    other = load_target(TargetSpec(f"{path}:other"))
    assert isinstance(other.model, torch.nn.Tanh) and list(other.call.kwargs) == ["input"]
    assert not other.model.training and other.name == "factory_file.py:other"
    with pytest.raises(ModelLoadError, match="defines no function nothing"):
        load_target(TargetSpec(f"{path}:nothing"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "make_model"),
        ("def model():\n    return 3", "returns int"),
        ("def model():\n    raise OSError('no weights')", "no weights"),
        ("import no_such_module_at_all", "cannot be imported"),
    ],
)
def test_a_file_without_a_model_says_what_is_missing(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_target(TargetSpec(written(tmp_path, "no_model.py", text)))


def test_inputs_of_the_command_line_win_over_the_yaml_and_that_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "order_file.py", WELL)
    declared = "{inputs: [{shape: [length, 4]}]}"
    config = written(
        tmp_path,
        "model-config.yaml",
        f"handler: {{openvino: {{warmup: {declared}, batching: {{dims: {{length: [2, 8]}}}}}}}}\n",
    )
    assert load_target(TargetSpec(path)).call.args[0].shape == (3, 4)
    assert load_target(TargetSpec(path, config)).call.args[0].shape == (1, 8, 4)
    assert load_target(TargetSpec(path, config, ("5,4",))).call.args[0].shape == (5, 4)


def test_options_of_the_yaml_hold_and_no_cache_is_used(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        "model-config.yaml",
        "pt2: {compile: {dynamic: true, options: {model_caching: true, disabled_ops: [aten.relu], "
        "config: {PERFORMANCE_HINT: LATENCY}}}}\n",
    )
    target = load_target(TargetSpec(written(tmp_path, "options_file.py", WELL), config))
    options = target.options.options
    assert options.disabled_ops == ("aten.relu",) and options.config == {"PERFORMANCE_HINT": "LATENCY"}
    assert not options.model_caching and options.cache_dir is None
    assert target.dynamic and target.config_path == Path(config)


@pytest.mark.parametrize(("stated", "hint"), [("f32", "f32"), ("bf16", "bf16"), ("auto", "f32")])
def test_the_precision_of_the_yaml_is_diagnosed_and_auto_says_what_it_is(
    tmp_path: Path, stated: str, hint: str
) -> None:
    if hint == "bf16" and "BF16" not in device_capabilities("CPU"):
        pytest.skip("needs a CPU with bf16")
    config = written(
        tmp_path,
        "model-config.yaml",
        f"pt2: {{compile: {{enable: true, backend: openvino}}}}\nhandler: {{openvino: {{precision: {stated}}}}}\n",
    )
    target = load_target(TargetSpec(written(tmp_path, f"precise_{stated}.py", WELL), config))
    assert target.options.options.ov_config()["INFERENCE_PRECISION_HINT"] == hint
    found = diagnose(target)
    assert found.summary["precision"] == hint == found.comparison["precision"] and not found.comparison["verdict"]
    notes = [note for note in found.report["notes"] if "handler.openvino.precision is auto" in note]
    assert bool(notes) == (stated == "auto")


@pytest.mark.parametrize(
    ("stated", "backend", "noted"),
    [("openvino_ts", "openvino_ts", False), ("export", "export", False), ("inductor", "openvino", True)],
)
def test_the_backend_is_that_of_the_yaml_or_a_note_says_why_not(
    tmp_path: Path, stated: str, backend: str, noted: bool
) -> None:
    config = written(tmp_path, "model-config.yaml", f"pt2: {{compile: {{enable: true, backend: {stated}}}}}\n")
    target = load_target(TargetSpec(written(tmp_path, f"backend_{stated}.py", WELL), config))
    assert target.backend == backend
    assert any(f"the backend {stated} cannot be diagnosed" in note for note in target.notes) == noted


def test_nothing_known_of_the_inputs_names_the_ways(tmp_path: Path) -> None:
    path = written(tmp_path, "inputs_file.py", "import torch\ndef model():\n    return torch.nn.ReLU()\n")
    with pytest.raises(ModelLoadError, match=r"--input .*warmup\.inputs.*example_inputs"):
        load_target(TargetSpec(path))


def test_an_exported_program_brings_its_own_inputs(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).eval()
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (torch.randn(2, 4),)), path)
    target = load_target(TargetSpec(str(path)))
    assert target.call.args[0].shape == (2, 4)
    found = diagnose(target)
    assert found.healthy and found.model == "model.pt2"


def test_torchscript_is_diagnosed(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()).save(str(tmp_path / "s.pt"))
    found = diagnose(load_target(TargetSpec(str(tmp_path / "s.pt"), inputs=("1,4",))))
    assert found.healthy and found.model == "s.pt"


def test_weights_alone_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(ModelLoadError, match="not a model with its code"):
        load_target(TargetSpec(str(tmp_path / "w.pt")))
    with pytest.raises(ModelLoadError, match="file not found"):
        load_target(TargetSpec(str(tmp_path / "none.mar")))


# A handler that does not use this package; TorchServe wants one class per file.
THEIR_HANDLER = """
import json
import torch
from ts.torch_handler.base_handler import BaseHandler
class Theirs(BaseHandler):
    def preprocess(self, data):
        return torch.stack([torch.tensor(json.loads(row["body"])["ids"]) for row in data])
"""
DERIVED_HANDLER = """
from theirs import Theirs
from torchserve_openvino import OpenVINOHandler
class Derived(OpenVINOHandler, Theirs):
    pass
"""


def archived(folder: Path, config: str, handler: Path, extra: tuple[Path, ...] = ()) -> Path:
    (folder / "model.py").write_text(ENCODER)
    (folder / "model-config.yaml").write_text(config)
    torch.save(encoder().state_dict(), folder / "weights.pth")
    arguments = ["--version", "1.0", "--handler", str(handler)]
    for option, name in (
        ("model-file", "model.py"),
        ("serialized-file", "weights.pth"),
        ("config-file", "model-config.yaml"),
    ):
        arguments += [f"--{option}", str(folder / name)]
    if extra:
        arguments += ["--extra-files", ",".join(map(str, extra))]
    return run_archiver(arguments, "small", folder)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A worker would refuse to serve this archive.
    return archived(
        tmp_path_factory.mktemp("archive"),
        "pt2: {compile: {options: {disabled_ops: [aten._softmax.default]}}}\n"
        "handler:\n  openvino:\n    fallback: {allow: [], on_violation: refuse}\n"
        "    warmup: {inputs: [{name: ids, shape: [4], dtype: int64, low: 0, high: 50}]}\n",
        handlers()["tensor"],
    )


def test_an_archive_is_loaded_by_its_handler_even_where_a_worker_refuses_it(archive: Path) -> None:
    target = load_target(TargetSpec(str(archive)))
    assert list(target.call.kwargs) == ["ids"] and target.call.kwargs["ids"].shape == (1, 4)
    assert torch.equal(target.model.embed.weight, encoder().embed.weight)
    found = diagnose(target)
    (refused,) = found.refused
    assert refused.op == "aten._softmax.default" and refused.where[0].startswith("model.py:")
    assert "softmax" in refused.source
    root = target.root
    assert root is not None and root.is_dir()
    target.keep.cleanup()
    assert not root.exists()


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_archive_with_a_handler_of_its_own(tmp_path: Path, dynamic: bool) -> None:
    (tmp_path / "theirs.py").write_text(THEIR_HANDLER)
    config = (
        f"pt2: {{compile: {{enable: true, backend: openvino, dynamic: {str(dynamic).lower()}}}}}\n"
        "handler: {openvino: {warmup: {inputs: [{name: ids, shape: [4], dtype: int64, low: 0, high: 50}]}}}\n"
    )
    target = load_target(TargetSpec(str(archived(tmp_path, config, tmp_path / "theirs.py"))))
    assert target.dynamic == dynamic and target.call.kwargs["ids"].shape == (1, 4)
    found = diagnose(target)
    assert found.healthy and not found.refused


def test_a_sample_of_the_archive_tells_the_inputs(tmp_path: Path) -> None:
    for name, text in (("theirs.py", THEIR_HANDLER), ("derived.py", DERIVED_HANDLER), ("s.json", '{"ids": [3, 1, 4]}')):
        (tmp_path / name).write_text(text)
    config = "handler: {openvino: {warmup: {samples: [s.json]}}}\n"
    extra = (tmp_path / "s.json", tmp_path / "theirs.py")
    target = load_target(TargetSpec(str(archived(tmp_path, config, tmp_path / "derived.py", extra))))
    assert torch.equal(target.call.args[0], torch.tensor([[3, 1, 4]]))
    assert diagnose(target).healthy


def test_a_damaged_archive_is_an_error(archive: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.mar"
    shutil.copy(archive, broken)
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(PackagingError):
        load_target(TargetSpec(str(broken)))


def test_the_measure_of_the_task_judges_a_narrow_precision(tmp_path: Path) -> None:
    config = (
        "handler: {openvino: {verify: {measure: {probability: 0.25}}, "
        "warmup: {inputs: [{name: ids, shape: [4], dtype: int64, low: 0, high: 50}]}}}\n"
    )
    task = load_target(TargetSpec(str(archived(tmp_path, config, handlers()["image_classifier"]))))
    assert task.measure == Top1(0.25) and not task.notes
    assert task.judge_in("bf16").measure == Top1(0.25) and task.judge_in("f32").measure is None
    # Far apart as numbers, the same classes for who reads them.
    got, expected = [torch.tensor([[20.0, 1.0]])], [torch.tensor([[30.0, 1.0]])]
    assert (
        task.judge_in("f32").judge(got, expected).problems and not task.judge_in("bf16").judge(got, expected).problems
    )


def test_a_measure_that_has_no_use_is_refused_or_noted(tmp_path: Path) -> None:
    config = (
        "handler: {openvino: {verify: {measure: {probability: 0.25}}, "
        "warmup: {inputs: [{name: ids, shape: [4], dtype: int64, low: 0, high: 50}]}}}\n"
    )
    with pytest.raises(ConfigError, match="answers of this handler are compared by numbers"):
        load_target(TargetSpec(str(archived(tmp_path, config, handlers()["tensor"]))))
    # Without its archive, the task of a model is not known.
    file = written(tmp_path, "measured_file.py", WELL)
    target = load_target(TargetSpec(file, str(tmp_path / "model-config.yaml"), ("2,4",)))
    assert target.judge_in("bf16").measure is None
    assert any("verify.measure has no effect here" in note for note in target.notes)


@pytest.mark.parametrize(
    "text", ["1,3:float32:0.0.5..1", "1,8:int64:0..0.5", "1,3:float32:1...5..2", "1,3:float32:...5"]
)
def test_numbers_are_read_as_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="--input"):
        parse_inputs([text])


def test_numbers_without_a_leading_zero() -> None:
    (values,), _ = parse_inputs(["1,1000:float32:0...5"])
    assert 0.4 < float(values.max()) <= 0.5


def test_example_inputs_that_fail_are_named(tmp_path: Path) -> None:
    path = tmp_path / "failing.py"
    path.write_text("import torch\nmodel = torch.nn.ReLU()\ndef example_inputs(): raise KeyError('x')\n")
    with pytest.raises(ModelLoadError, match=r"example_inputs\(\) failed: KeyError"):
        load_target(TargetSpec(path=str(path), config=None, inputs=(), mappings=()))
