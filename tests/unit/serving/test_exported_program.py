"""Exported programs come from outside: nothing in the file may run while it is read."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

from torchserve_openvino.doctor.target import TargetSpec, load_target
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.loading.exported_program import load_program
from torchserve_openvino.serving.loading.files import load_without_class

EXAMPLES = "data/sample_inputs/model.pt"
PROGRAM = "models/model.json"


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * x.shape[0] + self.shift + x.shape[0] ** 2


class Sizes(torch.nn.Module):
    """Has every kind of text that torch runs as code: formulas of sizes, guards, functions of sizes, subgraphs."""

    def forward(self, pair: dict[str, torch.Tensor], factor: float = 2.5, mode: str = "bilinear") -> Any:
        x, y = pair["x"], pair["y"]
        if x.shape[0] * 2 > y.shape[0] + 3:
            x = x * factor
        resized = torch.nn.functional.interpolate(y, scale_factor=0.5, mode=mode)
        chosen = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a.masked_fill(a > 2, float("nan")), (x,))
        product = torch.einsum("ij,kj->ik", x, chosen)
        return resized, chosen, product, x.nonzero(), max(x.shape[0], y.shape[2]), torch.sym_sqrt(x.shape[0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.pt2"
    rows = {"x": {0: Dim("rows", min=2, max=64)}}
    torch.export.save(torch.export.export(Small().eval(), (torch.randn(3, 4),), dynamic_shapes=rows), path)
    return path


def changed(source: Path, target: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """Writes a program with other members."""
    with zipfile.ZipFile(source) as archive:
        root = archive.namelist()[0].partition("/")[0]
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{root}/{name}" if not name.startswith("/") else name[1:], content)
    return target


class Evil:
    """Leaves a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def pickled(trace: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Evil(trace), buffer)
    return buffer.getvalue()


def into_program(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, bytes]], None]:
    def apply(members: dict[str, bytes]) -> None:
        program = json.loads(members[PROGRAM])
        change(program)
        members[PROGRAM] = json.dumps(program).encode()

    return apply


def graph(program: dict[str, Any]) -> dict[str, Any]:
    return program["graph_module"]["graph"]


def test_what_torch_writes_is_loaded(saved: Path, tmp_path: Path) -> None:
    x = torch.randn(5, 4)
    assert torch.isfinite(load_program(saved).module()(x)).all()
    inputs = ({"x": torch.randn(6, 4), "y": torch.randn(4, 3, 8, 8)},)
    shapes = ({"x": {0: Dim.AUTO}, "y": {0: Dim.AUTO, 2: Dim.AUTO}}, None, None)
    program = torch.export.export(Sizes().eval(), (*inputs, 2.5, "bilinear"), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "sizes.pt2")
    loaded, expected = load_program(tmp_path / "sizes.pt2"), program.module()(*inputs, 2.5, "bilinear")
    torch.testing.assert_close(loaded.module()(*inputs, 2.5, "bilinear"), expected, equal_nan=True)


def test_a_program_without_example_inputs_is_loaded(saved: Path, tmp_path: Path) -> None:
    program = torch.export.load(saved)
    program.example_inputs = None
    torch.export.save(program, tmp_path / "bare.pt2")
    assert load_program(tmp_path / "bare.pt2").example_inputs is None


def weights_pickle(members: dict[str, bytes], trace: Path) -> None:
    name = "data/weights/model_weights_config.json"
    config = json.loads(members[name])
    record = next(iter(config["config"].values()))
    record["use_pickle"] = True
    members[f"data/weights/{record['path_name']}"] = pickled(trace)
    members[name] = json.dumps(config).encode()


def opaque_constant(members: dict[str, bytes], trace: Path) -> None:
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    members["data/constants/model_constants_config.json"] = json.dumps({"config": {"c": entry}}).encode()
    members["data/constants/opaque_obj_0"] = pickle.dumps(Evil(trace))


def older_format(members: dict[str, bytes], trace: Path) -> None:
    # What torch.export.load falls back to when the newer format raises.
    del members["archive_version"]
    members |= {
        "/version": b"8.14", "/serialized_exported_program.json": members[PROGRAM],
        "/serialized_state_dict.pt": pickled(trace), "/serialized_constants.pt": b"",
        "/serialized_example_inputs.pt": b"",
    }  # fmt: skip


PICKLES: dict[str, Callable[[dict[str, bytes], Path], None]] = {
    "examples": lambda members, trace: members.update({EXAMPLES: pickled(trace)}),
    "examples in other case": lambda members, trace: members.update({"data/sample_inputs/MODEL.pt": pickled(trace)}),
    "weights": weights_pickle,
    "weights of an older format": lambda members, trace: members.update({"data/weights/model.pt": pickled(trace)}),
    "constants of an older format": lambda members, trace: members.update({"data/constants/model.pt": pickled(trace)}),
    "opaque constant": opaque_constant,
    "whole file of an older format": older_format,
}


@pytest.mark.quick(kind=["examples", "weights", "whole file of an older format"])
@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_is_never_run(saved: Path, tmp_path: Path, kind: str) -> None:
    trace = tmp_path / "trace"
    path = changed(saved, tmp_path / "model.pt2", lambda members: PICKLES[kind](members, trace))
    for read in (load_program, load_without_class, lambda path: load_target(TargetSpec(str(path)))):
        with pytest.raises(ModelLoadError, match="model.pt2"):
            read(path)
    assert not trace.exists()


def test_a_compiled_library_is_refused(saved: Path, tmp_path: Path) -> None:
    path = changed(saved, tmp_path / "model.pt2", lambda m: m.update({"data/aotinductor/model/model.so": b"\x7fELF"}))
    with pytest.raises(ModelLoadError, match="aotinductor"):
        load_program(path)


def call_of(target: str, *texts: str) -> dict[str, Any]:
    inputs = [{"name": "", "arg": {"as_string": text}, "kind": 1} for text in texts]
    output = {"as_tensor": {"name": "ran"}}
    return {"target": target, "inputs": inputs, "outputs": [output], "metadata": {}, "name": "ran"}


def with_size(text: str) -> Callable[[dict[str, Any]], None]:
    def change(program: dict[str, Any]) -> None:
        values = graph(program)["sym_int_values"]
        next(iter(values.values()))["as_expr"]["expr_str"] = text

    return change


def with_spec(change_spec: Callable[[Any], None]) -> Callable[[dict[str, Any]], None]:
    def change(program: dict[str, Any]) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        protocol, spec = json.loads(signature["in_spec"])
        change_spec(spec)
        signature["in_spec"] = json.dumps([protocol, spec])

    return change


RUN = "__import__('pathlib').Path('TRACE').touch()"
TEXTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "size": with_size(RUN),
    "size in a symbol": with_size(f'Symbol("{RUN}", integer=True)'),
    "size by an attribute": with_size("Symbol.mro()"),
    "guard": lambda program: program.update({"guards_code": [RUN]}),
    "guard that ends its message": lambda program: program.update({"guards_code": [f'"{RUN}" == 1']}),
    "guard by a builtin": lambda program: program.update({"guards_code": ["open('TRACE', 'w')"]}),
    "function": lambda program: graph(program)["nodes"].insert(0, call_of("torch.os.mkdir", "TRACE")),
    "operator.methodcaller": lambda program: graph(program)["nodes"].insert(0, call_of("_operator.methodcaller", "a")),
    "file": lambda program: graph(program)["nodes"].insert(0, call_of("torch.ops.aten.from_file.default", "TRACE")),
    "delegate": lambda program: graph(program)["nodes"].insert(
        0, call_of("torch.ops.higher_order.aoti_call_delegate")
    ),
    "method of an operator": lambda program: graph(program)["nodes"].insert(
        0, call_of("torch.ops.aten.add.__init__", "a")
    ),
    "name of an argument": lambda program: program["graph_module"]["module_call_graph"][0]["signature"].update(
        {"forward_arg_names": [f"x={RUN}"]}
    ),
    "name of a weight": lambda program: program["graph_module"]["signature"]["input_specs"][0]["parameter"].update(
        {"parameter_name": f'layer"), {RUN}, ("'}
    ),
    "name of an input": lambda program: graph(program)["inputs"].append({"as_tensor": {"name": f"x={RUN}"}}),
    "module of an enum": with_spec(
        lambda spec: spec["children_spec"][1].update(
            {"context": json.dumps([{"__enum__": True, "fqn": "antigravity:A", "name": "B"}])}
        )
    ),
    "module of a default": with_spec(
        lambda spec: spec["children_spec"][1].update(
            {
                "type": "collections.defaultdict",
                "context": {"default_factory_module": "antigravity", "default_factory_name": "a", "dict_context": []},
            }
        )
    ),
    "deep nesting": lambda program: program.update({"verifiers": "deep"}),
}  # fmt: skip


@pytest.mark.quick(kind=["size", "guard", "function", "file", "name of a weight"])
@pytest.mark.parametrize("kind", TEXTS)
def test_no_text_becomes_code(saved: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = changed(saved, tmp_path / "model.pt2", into_program(TEXTS[kind]))
    if kind == "deep nesting":
        changed(path, path, lambda m: m.update({PROGRAM: m[PROGRAM].replace(b'"deep"', b"[" * 9000 + b"]" * 9000)}))
    with pytest.raises(ModelLoadError, match="not valid JSON" if kind == "deep nesting" else "could run code"):
        load_program(path)
    assert not (tmp_path / "TRACE").exists()


def test_a_tensor_without_content_claims_no_memory(saved: Path, tmp_path: Path) -> None:
    def empty(members: dict[str, bytes]) -> None:
        name = "data/weights/model_weights_config.json"
        config = json.loads(members[name])
        record = next(iter(config["config"].values()))
        record["tensor_meta"]["sizes"] = [{"as_int": 2**40}]
        members |= {f"data/weights/{record['path_name']}": b"", name: json.dumps(config).encode()}

    with pytest.raises(ModelLoadError, match="has no content"):
        load_program(changed(saved, tmp_path / "model.pt2", empty))
