"""TorchScript modules on OpenVINO: the same answers as the TorchScript interpreter's, or counted as a fallback."""

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import torchserve_openvino as tov
from torchserve_openvino.backend.compiled import CompiledModule
from torchserve_openvino.backend.torchscript.python_form import python_form
from torchserve_openvino.errors import ConfigError, TorchScriptModelError


def compiled(model: nn.Module, **options: object) -> CompiledModule:
    return tov.compile(model, options={"min_partition_us": 0}, **options)


def same(one: object, other: object) -> None:
    left, right = pytree.tree_leaves(one), pytree.tree_leaves(other)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def whole(model: nn.Module, *calls: tuple, trace: bool = False, dynamic: bool = False) -> CompiledModule:
    """Compares calls with TorchScript's, and checks that OpenVINO ran all operators in one graph."""
    model = model.eval()
    scripted = torch.jit.trace(model, calls[0], check_trace=False) if trace else torch.jit.script(model)
    made = compiled(scripted, dynamic=dynamic)
    with torch.inference_mode():
        for call in calls:
            same(made(*call), scripted(*call))
    assert made.report.summary.coverage == 1.0 and made.report.summary.fallbacks == 0, made.report.fallbacks
    return made


class Pair(NamedTuple):
    double: torch.Tensor
    more: torch.Tensor


class Structures(nn.Module):
    """Lists, dictionaries, a named tuple, text, optional arguments, branches and loops on sizes."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, times: int = 2):
        if x.size(1) > 64:
            raise ValueError(f"too wide: {x.size(1)}")
        parts: dict[str, torch.Tensor] = {"x": x}
        if scale is not None:
            parts["scaled"] = x * scale
        rows: list[torch.Tensor] = []
        for i in range(times):
            rows.append(x[:, i] + i)
        n = 0
        while n < x.size(1) // 2:
            x = x * 0.5 + n
            n += 1
        return Pair(x, torch.stack(rows)), parts, x.shape[0] // -3, x.dtype == torch.float32


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 6, batch_first=True, num_layers=2, bidirectional=True)

    def forward(self, ids: torch.Tensor):
        return self.lstm(self.embed(ids))


class Reshaped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, width = x.shape
        return x.permute(0, 2, 1).reshape(batch, width * channels // 2, 2)[:] + torch.arange(2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_python_around_the_operators(dynamic: bool) -> None:
    x = torch.randn(3, 4)
    made = whole(Structures(), (x,), (x, torch.randn(4)), (x, None, 3), dynamic=dynamic)
    with torch.inference_mode():
        same(made(x=x, times=1), torch.jit.script(Structures())(x, times=1))
        with pytest.raises(Exception, match="too wide: 65"):
            made(torch.randn(1, 65))


def test_recurrent_layers_stay_whole() -> None:
    whole(Recurrent(), (torch.randint(0, 20, (2, 5)),))


def test_a_trace_computes_with_sizes_as_tensors() -> None:
    calls = (torch.randn(2, 4, 6),), (torch.randn(5, 4, 6),)
    whole(Reshaped(), *calls, trace=True, dynamic=True)
    whole(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.randn(3, 4, 8),), trace=True)


class Numbers(nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor):
        return x * 0.1 / 3.7 + 1e-9 - 2.0, 1 - x * 5, n * 0.1


def test_a_trace_holds_numbers_as_tensors_of_float64() -> None:
    traced = torch.jit.trace(Numbers(), (torch.randn(3, 4), torch.arange(3)))
    made, x = compiled(traced), torch.randn(3, 4)
    for call in ((x, torch.arange(3)), (x.double(), torch.arange(3)), (x[0, 0], torch.tensor(3))):
        same(made(*call), traced(*call))
        assert [each.dtype for each in made(*call)] == [each.dtype for each in traced(*call)]
    assert compiled(traced)(x, torch.arange(3))[0].dtype is torch.float32
    whole(nn.Sequential(Scaled(0.3, True)), (x,), trace=True)


def test_a_scripted_transformer() -> None:
    whole(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.randn(3, 4, 8),))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if bool(y.sum() > 0):
            return torch.relu(y) + 1
        return torch.sigmoid(y)


def test_a_branch_on_values_breaks_the_graph_at_its_line() -> None:
    scripted = torch.jit.script(Branch().eval())
    made = compiled(scripted)
    with torch.inference_mode():
        for x in (torch.ones(2, 4), -torch.ones(2, 4), torch.randn(2, 4) * 9):
            same(made(x), scripted(x))
    (broken,) = made.report.fallbacks
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if text.strip() == "if bool(y.sum() > 0):")
    assert broken.kind == "graph_break" and broken.where == f"{__file__}:{line}"
    assert made.report.summary.coverage == 1.0


def test_integers_are_limited_as_in_any_model() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1) * 3

    scripted = torch.jit.script(Sum())
    made = compiled(scripted)
    for x in (torch.arange(4), torch.tensor([2**40, 2**62])):
        assert torch.equal(made(x), scripted(x))
    assert made.report.fallback_counts() == {"runtime_failed": 1}


# --- what has no form in Python -------------------------------------------------------------------------------------


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = [torch.zeros(2, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return torch.stack(self.seen).sum(0)


class RememberingElsewhere(Remembering):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lists = [self.seen]
        lists[0].append(x)
        return torch.stack(self.seen).sum(0)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_forward_hook(doubled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def doubled(self, input: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return output * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "op"),
    [
        (Counter, "prim::SetAttr"),
        (Remembering, "prim::GetAttr"),
        (RememberingElsewhere, "prim::GetAttr"),
        (Hooked, "forward"),
        (
            lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}),
            "quantized::linear_dynamic",
        ),
    ],
)
def test_the_whole_model_runs_in_torchscript_and_is_counted(make, op: str) -> None:
    torch.manual_seed(0)
    scripted = torch.jit.script(make().eval())
    reference = torch.jit.script(make().eval())
    reference.load_state_dict(scripted.state_dict()) if op != "quantized::linear_dynamic" else None
    made = compiled(scripted)
    x = torch.randn(2, 4)
    with torch.inference_mode():
        for _ in range(3):
            answer = made(x)
            if op != "quantized::linear_dynamic":
                same(answer, reference(x))
    (fallback,) = made.report.fallbacks
    assert (fallback.kind, fallback.op, fallback.count) == ("conversion_failed", op, 3)
    assert ".py:" in fallback.where or op == "forward"
    summary = made.report.summary
    assert summary.coverage == 0.0 and summary.ops_total > 0


# --- methods and attributes -----------------------------------------------------------------------------------------


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale

    @torch.jit.export
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))

    @torch.jit.export
    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) - 1


def test_methods_are_compiled_if_named_and_counted_if_not() -> None:
    scripted = torch.jit.script(Methods().eval())
    made = compiled(scripted, methods=["encode"])
    x = torch.randn(2, 4)
    with torch.inference_mode():
        same(made.encode(x), scripted.encode(x))
        same(made.forward(x), scripted(x))
        assert made.report.summary.coverage == 1.0 and made.report.summary.fallbacks == 0
        same(made.other(x), scripted.other(x))
    assert [(each.kind, each.op.rpartition(".")[2]) for each in made.report.fallbacks] == [
        ("outside_compiled", "other")
    ]
    with pytest.raises(ConfigError, match="nothing"):
        compiled(scripted, methods=["nothing"])


def test_a_changed_attribute_or_weight_is_never_stale() -> None:
    scripted = torch.jit.script(Methods().eval())
    made, x = compiled(scripted), torch.randn(2, 4)
    with torch.inference_mode():
        same(made(x), scripted(x))
    with torch.no_grad():
        scripted.linear.weight.add_(1.0)
    with torch.inference_mode():
        same(made(x), scripted(x))
        assert made.report.summary.fallbacks == 0
        scripted.scale = 5.0
        same(made(x), scripted(x))
    assert "'scale' of the module was changed" in made.report.fallbacks[0].reason


def test_functions_and_foreign_backends() -> None:
    @torch.jit.script
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    made, x = compiled(function), torch.randn(3)
    same(made(x), function(x))
    assert made.report.summary.coverage == 1.0
    with pytest.raises(TorchScriptModelError, match="inductor"):
        tov.compile(torch.jit.script(nn.ReLU()), backend="inductor")


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
def test_every_backend(backend: str) -> None:
    scripted, x = (
        torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()),
        torch.randn(2, 3, 8, 8),
    )
    made = compiled(scripted, backend=backend).freeze()
    with torch.inference_mode():
        for _ in range(3):
            same(made(x), scripted(x))
    assert made.report.summary.coverage == 1.0 and made.frozen == 1


def test_no_name_of_the_model_becomes_code() -> None:
    """Names of arguments, attributes and text are the only parts that its author chooses."""

    class Evil(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
            return x + 1, "'''\n__import__('os').abort()\n#" + '"""'

    scripted = torch.jit.script(Evil())
    with torch.inference_mode():
        same(compiled(scripted)(torch.ones(2))[0], torch.full((2,), 2.0))


class Scaled(nn.Module):
    def __init__(self, factor: float, negative: bool) -> None:
        super().__init__()
        self.factor, self.negative = factor, negative

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.factor
        return -y if self.negative else y


def test_the_cache_tells_models_apart_by_code_and_constants(tmp_path: Path) -> None:
    options = {"min_partition_us": 0, "model_caching": True, "cache_dir": str(tmp_path)}
    x = torch.randn(3)
    for factor, negative in ((2.0, False), (3.0, False), (2.0, True)):
        scripted = torch.jit.script(Scaled(factor, negative).eval())
        for hits in (0, 1):
            made = tov.compile(scripted, options=options).freeze()
            with torch.inference_mode():
                same(made(x), scripted(x))
            assert made.report.tracker.cache.call_hits == hits


@torch.jit.script
def quotients(a: float, b: float):
    return a // b, a / b, min(a, b), max(a, b)


@torch.jit.script
def powers(a: float, b: float):
    return a**b


@torch.jit.script
def texts(a: float, b: int):
    return str(a), "{} of {}".format(a, b)  # noqa: UP032


NUMBERS = [
    0.0, -0.0, 1.0, 0.1, -0.1, 2.5, -3.0, 7.0, 1e10, 123456789.0, 1e-7, 1e300, math.inf, -math.inf, math.nan, 1 / 3,
]  # fmt: skip


@pytest.mark.parametrize("function", [quotients, powers], ids=["quotients", "powers"])
def test_numbers_outside_tensors_follow_torchscript(function) -> None:
    form = python_form(function)
    for a in NUMBERS:
        for b in NUMBERS:
            try:
                expected = function(a, b)
            except RuntimeError:
                with pytest.raises(RuntimeError):
                    form(a, b)
            else:
                assert repr(form(a, b)) == repr(expected), (a, b)


def test_floats_are_written_as_torchscript_writes_them() -> None:
    for a in (0.0, 2.0, -3.0, 2.5, 0.1, 1 / 3, 1e-7, 123456789.0, math.inf, math.nan):
        assert python_form(texts)(a, 2) == texts(a, 2), a


class _Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return x + 1
        return x - 1


def test_modes_are_those_of_the_call() -> None:
    scripted, x = torch.jit.script(_Asks()), torch.ones(3)
    made = compiled(scripted)
    with torch.no_grad():
        same(made(x), scripted(x))
    same(made(x), scripted(x))
    with torch.no_grad():
        same(made(x), scripted(x))


def test_an_encoder_that_was_compiled_with_gradients_on_masks_as_torchscript_does() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    scripted = torch.jit.script(nn.TransformerEncoder(layer, 2).eval())
    made, x = compiled(scripted), torch.randn(2, 5, 16)
    mask = torch.tensor([[False] * 5, [False, False, True, True, True]])
    with torch.no_grad():
        same(made(x, src_key_padding_mask=mask), scripted(x, src_key_padding_mask=mask))


class _Nested(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table: dict[str, list[int]] = {"steps": [0]}
        self.rows: list[list[int]] = [[0], [1]]
        self.pair: tuple[list[int], int] = ([0], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "table":
            self.table["steps"].append(1)
        elif self.kind == "rows":
            for row in self.rows:
                row.append(1)
        else:
            self.pair[0].append(1)
        return x * (len(self.table["steps"]) + len(self.rows[0]) + len(self.pair[0]))


@pytest.mark.parametrize("kind", ["table", "rows", "pair"])
def test_what_a_module_keeps_in_containers_of_containers_is_kept(kind: str) -> None:
    scripted, reference = torch.jit.script(_Nested(kind)), torch.jit.script(_Nested(kind))
    made, x = compiled(scripted), torch.ones(2)
    for _ in range(3):
        same(made(x), reference(x))


def test_a_named_tuple_has_its_fields() -> None:
    class Named(nn.Module):
        def forward(self, x: torch.Tensor) -> Pair:
            return Pair(x * 2, x + 1)

    scripted = torch.jit.script(Named())
    got, x = compiled(scripted)(torch.ones(2)), torch.ones(2)
    assert got._fields == scripted(x)._fields == ("double", "more")
    same(got.more, x + 1)
