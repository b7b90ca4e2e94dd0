"""Mappings of operators and modules to OpenVINO that the user registers."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openvino as ov
import openvino.opset13 as ops
import pytest
import torch
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.errors import ConfigError, OpMappingError, UnknownOperatorError

LIBRARY = torch.library.Library("tovtest", "DEF")
LIBRARY.define("scaled_tanh(Tensor x, float scale=2.0, *, bool negate=False) -> Tensor")
LIBRARY.define("split_sign(Tensor x) -> (Tensor, Tensor)")
LIBRARY.define("mean_of(Tensor[] xs, int[] dims=[0]) -> Tensor")


def _scaled_tanh(x: Tensor, scale: float = 2.0, *, negate: bool = False) -> Tensor:
    return x.tanh() * (-scale if negate else scale)


def _split_sign(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clamp(min=0), x.clamp(max=0)


def _mean_of(xs: list[Tensor], dims: list[int] | None = None) -> Tensor:
    return torch.stack([x.mean(dims or [0]) for x in xs]).mean(0)


for name, function in (("scaled_tanh", _scaled_tanh), ("split_sign", _split_sign), ("mean_of", _mean_of)):
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    tov.forget_mappings()


def constant(value: float, like: Any) -> Any:
    return ops.constant(value, dtype=like.get_element_type())


def run(model: Any, *inputs: Tensor, **options: Any) -> tov.CompiledModule:
    """Compiles a model, compares one call with eager, and returns the compiled model."""
    torch._dynamo.reset()
    options["options"] = {"min_partition_us": 0, **options.get("options", {})}
    compiled = tov.compile(model, **options)
    with torch.inference_mode():
        assert_same(compiled(*inputs), model(*inputs), strides=False)
    return compiled


X = torch.randn(3, 4)


def test_without_a_mapping_it_runs_in_eager_and_says_so() -> None:
    compiled = run(lambda x: torch.ops.tovtest.scaled_tanh(x) + 1, X)
    (left,) = compiled.report.fallbacks
    assert (left.kind, left.op) == ("unsupported_op", "tovtest.scaled_tanh.default")
    assert "no conversion rule" in left.reason


@pytest.mark.parametrize(
    "target", ["tovtest::scaled_tanh", "tovtest.scaled_tanh.default", torch.ops.tovtest.scaled_tanh.default]
)
def test_a_mapping_gets_the_schema_s_arguments(target: Any) -> None:
    seen: list[Any] = []

    @tov.register_op(target)
    def scaled_tanh(x: ov.Output, scale: float, *, negate: bool) -> ov.Node:
        seen.append((scale, negate))
        return ops.multiply(ops.tanh(x), constant(-scale if negate else scale, x))

    def model(x: Tensor) -> Tensor:
        y = torch.ops.tovtest.scaled_tanh(x)
        return torch.ops.tovtest.scaled_tanh(y, 0.5, negate=True) + 1

    compiled = run(model, X)
    assert seen == [(2.0, False), (0.5, True)]
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


def test_a_mapping_need_not_take_what_stays_at_its_default() -> None:
    tov.register_op("tovtest::scaled_tanh")(lambda x: ops.multiply(ops.tanh(x), constant(2.0, x)))
    assert run(torch.ops.tovtest.scaled_tanh, X).report.summary.coverage == 1.0


def test_several_outputs_in_any_order_and_one_of_them_unused() -> None:
    @tov.register_op("tovtest::split_sign")
    def split_sign(x: ov.Output) -> Any:
        zero = constant(0.0, x)
        return ops.maximum(x, zero), ops.minimum(x, zero)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        high, low = torch.ops.tovtest.split_sign(x)
        return low.exp(), high + low

    assert run(model, X).report.summary.coverage == 1.0
    assert run(lambda x: torch.ops.tovtest.split_sign(x)[1], X).report.summary.coverage == 1.0


def test_a_list_of_tensors() -> None:
    @tov.register_op("tovtest::mean_of")
    def mean_of(xs: list[ov.Output], dims: list[int]) -> ov.Node:
        means = [ops.unsqueeze(ops.reduce_mean(x, dims, False), 0) for x in xs]
        return ops.reduce_mean(ops.concat(means, 0), [0], False)

    assert run(lambda x: torch.ops.tovtest.mean_of([x, x + 1], [1]), X).report.summary.coverage == 1.0


def test_aten_operators_can_be_taken_over() -> None:
    tov.register_op("aten::relu")(lambda x: ops.multiply(ops.relu(x), constant(1.0, x)))
    assert run(nn.ReLU(), X).report.summary.coverage == 1.0
    # A wrong mapping changes the answer, so the mapping does run.
    tov.register_op("aten::relu")(ops.abs)
    torch._dynamo.reset()
    with torch.inference_mode():
        assert torch.equal(tov.compile(nn.ReLU())(X), X.abs())


def test_a_decomposed_operator_stays_whole_once_it_is_mapped() -> None:
    tov.register_op("aten::softplus")(lambda x: ops.softplus(x))
    compiled = run(nn.Softplus(), X)
    assert compiled.report.to_dict()["graphs"][0]["partitions"][0]["op_counts"] == {"aten.softplus.default": 1}


def test_disabled_ops_win() -> None:
    tov.register_op("aten::relu")(ops.abs)
    compiled = run(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), X, options={"disabled_ops": ["aten.relu"]})
    assert [f.kind for f in compiled.report.fallbacks] == ["disabled_op"]


def test_a_model_keeps_what_was_registered_when_it_was_compiled() -> None:
    compiled = tov.compile(nn.ReLU())
    tov.register_op("aten::relu")(ops.abs)
    with torch.inference_mode():
        assert torch.equal(compiled(X), X.relu())


@pytest.mark.parametrize(
    ("convert", "said"),
    [
        (lambda x: 1 / 0, "ZeroDivisionError"),
        (lambda x: 7, "returns a value of type int"),
        (lambda x: (x, x), "returns 2 output"),
        (lambda x: ops.convert(x, "i32"), "is i32, torch has torch.float32"),
        (lambda x: ops.reshape(x, [12], False), "has shape [12], torch has [3, 4]"),
    ],
)
def test_a_mapping_that_fails_is_a_fallback_with_its_reason(convert: Any, said: str) -> None:
    tov.register_op("tovtest::scaled_tanh")(convert)
    compiled = run(lambda x: torch.ops.tovtest.scaled_tanh(x).exp() + 1, X)
    (left,) = compiled.report.fallbacks
    assert (left.kind, left.op) == ("conversion_failed", "tovtest.scaled_tanh.default") and said in left.reason
    assert 0 < compiled.report.summary.coverage < 1


def test_dynamic_shapes() -> None:
    tov.register_op("tovtest::scaled_tanh")(lambda x, scale: ops.multiply(ops.tanh(x), constant(scale, x)))
    compiled = tov.compile(lambda x: torch.ops.tovtest.scaled_tanh(x) + 1, dynamic=True)
    with torch.inference_mode():
        for size in (2, 5, 7):
            x = torch.randn(size, 4)
            assert torch.allclose(compiled(x), 2 * x.tanh() + 1, atol=1e-5)
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


def test_the_way_through_torchscript_leaves_mapped_operators_to_eager() -> None:
    tov.register_op("tovtest::scaled_tanh")(lambda x: ops.multiply(ops.tanh(x), constant(2.0, x)))
    model = nn.Linear(4, 4).eval()
    compiled = run(lambda x: torch.ops.tovtest.scaled_tanh(model(x)), X, backend="openvino_ts")
    (left,) = compiled.report.fallbacks
    assert (left.kind, left.op) == ("conversion_failed", "tovtest.scaled_tanh.default") and "openvino_ts" in left.reason
    assert run(lambda x: x.relu(), X, backend="openvino_ts").report.summary.coverage == 1.0


def test_the_way_by_export_takes_mapped_operators() -> None:
    tov.register_op("tovtest::scaled_tanh")(lambda x: ops.multiply(ops.tanh(x), constant(2.0, x)))

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.tovtest.scaled_tanh(x) + 1

    assert run(Scaled().eval(), X, backend="export").report.summary.coverage == 1.0


# --- modules --------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, size: int = 4, power: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 1)
        self.power = power

    def forward(self, x: Tensor, shift: float = 0.0, mask: Tensor | None = None) -> Tensor:
        y = x / x.abs().pow(self.power).sum(-1, keepdim=True).pow(1 / self.power) * self.weight + shift
        return y if mask is None else y * mask


def norm(module: Norm, x: ov.Output, shift: float = 0.0, mask: ov.Output | None = None) -> ov.Node:
    length = ops.reduce_sum(ops.power(ops.abs(x), constant(module.power, x)), [-1], True)
    y = ops.divide(x, ops.power(length, constant(1 / module.power, x)))
    y = ops.add(ops.multiply(y, ops.constant(module.weight.detach().numpy())), constant(shift, x))
    return y if mask is None else ops.multiply(y, mask)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), Norm(), nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        return self.last(self.norm(self.first(x), 0.5, mask=mask))


def test_a_module_is_converted_whole() -> None:
    tov.register_op(Norm)(norm)
    net = Net().eval()
    compiled = run(net, X)
    (graph,) = compiled.report.to_dict()["graphs"]
    assert any("openvino_module.Norm_norm" in op for op in graph["partitions"][0]["op_counts"])
    assert compiled.report.summary.coverage == 1.0
    mask = torch.rand(3, 4)
    assert run(net, X, mask).report.summary.coverage == 1.0
    assert type(compiled.eager.norm) is Norm and "forward" not in vars(net.norm)


def test_a_mapped_module_s_weights_attributes_and_state_are_live() -> None:
    tov.register_op(Norm)(norm)
    net = Net().eval()
    compiled = tov.compile(net)
    with torch.inference_mode():
        compiled(X)
        assert net.calls == 1
    with torch.no_grad():
        net.norm.weight += 1
        assert torch.allclose(compiled(X), net(X), atol=1e-5)
        net.norm.weight = nn.Parameter(torch.rand(4))
        assert torch.allclose(compiled(X), net(X), atol=1e-5)


def test_several_outputs_of_a_module_and_two_modules_of_one_class() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x[:, :2], x[:, 2:]

    @tov.register_op(Halves, outputs=2)
    def halves(module: Halves, x: ov.Output) -> Any:
        return tuple(ops.split(x, 1, 2).outputs())

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Halves(), Halves()

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.a(x)
            low, high = self.b(x.exp())
            return left * high + right * low

    assert run(Two().eval(), X).report.summary.coverage == 1.0


def test_with_gradients_the_module_itself_runs() -> None:
    tov.register_op(Norm)(norm)
    net = Net().eval()
    compiled = tov.compile(net)
    x = X.clone().requires_grad_()
    compiled(x).sum().backward()
    ours, x.grad = x.grad, None
    net(x).sum().backward()
    assert ours is not None and torch.allclose(ours, x.grad, atol=1e-5)


# --- names and files ----------------------------------------------------------------------------------------------


def test_unknown_names_are_refused_at_once() -> None:
    with pytest.raises(UnknownOperatorError, match="aten.relu"):
        tov.register_op("aten::reluu")
    with pytest.raises(ConfigError, match="CompositeImplicitAutograd"):
        tov.register_op("aten::linear")
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module"):
        tov.register_op(int)
    with pytest.raises(ConfigError, match="outputs"):
        tov.register_op(Norm, outputs=0)


def test_a_file_of_mappings(tmp_path: Path) -> None:
    file = tmp_path / "my_ops.py"
    file.write_text(
        "import openvino.opset13 as ops\nimport torchserve_openvino as tov\n\n"
        "@tov.register_op('tovtest::scaled_tanh')\n"
        "def scaled_tanh(x, scale):\n"
        "    return ops.multiply(ops.tanh(x), ops.constant(scale, dtype=x.get_element_type()))\n"
    )
    tov.load_mappings(file)
    assert run(torch.ops.tovtest.scaled_tanh, X).report.summary.coverage == 1.0


LIBRARY.define("native_sin(Tensor x) -> Tensor")
LIBRARY.impl("native_sin", lambda x: 3 * x.sin(), "CompositeExplicitAutograd")
NATIVE = """
#include <memory>
#include <openvino/core/extension.hpp>
#include <openvino/frontend/extension.hpp>
#include <openvino/op/constant.hpp>
#include <openvino/op/multiply.hpp>
#include <openvino/op/sin.hpp>

using namespace ov;
OPENVINO_CREATE_EXTENSIONS(std::vector<Extension::Ptr>({std::make_shared<frontend::ConversionExtension>(
    "tovtest.native_sin.default",
    frontend::CreatorFunction([](const frontend::NodeContext& node) -> OutputVector {
        auto three = op::v0::Constant::create(element::f32, Shape{}, {3.0f});
        return {std::make_shared<op::v1::Multiply>(std::make_shared<op::v0::Sin>(node.get_input(0)), three)};
    }))}));
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_an_extension_library(tmp_path: Path) -> None:
    home = Path(ov.__file__).parent
    (tmp_path / "native.cpp").write_text(NATIVE)
    core = next((home / "libs").glob("libopenvino.so.*"))
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-std=c++17", f"-I{home / 'include'}", "native.cpp", "-o", "native.so", core],
        cwd=tmp_path,
        check=True,
    )
    assert run(torch.ops.tovtest.native_sin, X).report.summary.coverage == 0.0
    tov.load_mappings(tmp_path / "native.so")
    assert run(torch.ops.tovtest.native_sin, X).report.summary.coverage == 1.0


def test_what_is_no_extension_library(tmp_path: Path) -> None:
    (tmp_path / "other.so").write_bytes(b"no library")
    tov.load_mappings(tmp_path / "other.so")
    with pytest.raises(OpMappingError, match=r"other\.so is not an extension library of OpenVINO"):
        tov.compile(nn.ReLU())


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("absent.py", None, "file not found"),
        ("broken.py", "import nothing_of_this_name", "ModuleNotFoundError"),
        ("empty.py", "x = 1", "registers nothing"),
        ("ops.txt", "", "neither Python"),
    ],
)
def test_a_file_that_can_t_be_loaded_changes_nothing(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(OpMappingError, match=said):
        tov.load_mappings(tmp_path / name)
