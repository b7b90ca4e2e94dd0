"""Operators that were correct alone but wrong together: aliased outputs, masks, indices, layouts, values.

Each case runs twice with different values, and its outputs are written to memory filled with NaN.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import torchserve_openvino as tov

BACKENDS = ("openvino", "openvino_ts", "export")


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def strides(tensor: Tensor) -> list[int]:
    """Returns the strides of the dimensions with more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def memories(tensors: list[Tensor]) -> list[int]:
    """Returns for each tensor the index of the first one in the list with the same storage."""
    pointers = [t.untyped_storage().data_ptr() for t in tensors]
    return [pointers.index(pointer) for pointer in pointers]


def assert_right(model: Callable[..., Any], *calls: tuple[Tensor, ...], **options: Any) -> tov.CompileReport:
    """Compares values, types, shapes, strides and shared memory with eager, for each call."""
    compiled = tov.compile(model, **options)
    for call in calls:
        given = tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in call)
        expected = pytree.tree_leaves((call, model(*call)))
        with compiled.poisoned():
            got = pytree.tree_leaves((given, compiled(*given)))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
            assert not isinstance(b, Tensor) or strides(a) == strides(b)
        both = [[t for t in leaves if isinstance(t, Tensor)] for leaves in (got, expected)]
        assert memories(both[0]) == memories(both[1])
    return compiled.report


def two(*shapes: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return [tuple(torch.randn(shape) for shape in shapes) for _ in range(2)]


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "clone beside computed": lambda x: (x.clone(), x.softmax(-1)),
    "input itself": lambda x: (x, x * 2 + 1),
    "detached": lambda x: (x.detach(), x * 2 + 1),
    "reshaped copy": lambda x: (x.reshape(6, 4).clone(), x.exp()),
    "chunks of the input": lambda x: (*x.chunk(2, -1), x.exp()),
    "copies of chunks": lambda x: (*(t.clone() for t in x.chunk(2, 0)), x.exp()),
    "chunks of a result": lambda x: (x * 2).chunk(3, -1),
    "a result and its views": lambda x: [(y.transpose(0, 1), y, y[:, 1:], y.view(-1)) for y in [x * 2]],
    "windows": lambda x: [(y, y.unfold(-1, 2, 1), y.unfold(0, 3, 2) * 2, x.unfold(1, 2, 2)) for y in [x * 2]],
    "expanded": lambda x: (x[:1].expand(4, 6), x.relu()),
    "constants": lambda x: (torch.ones(2, 4) + 1, x.clone()),
    "twice the same": lambda x: [(y, y, x) for y in [x.tanh()]],
    "selected": lambda x: (x[1], (x + 1)[:, 2], x.sum()),
    "nothing but views": lambda x: (x.t(), x.unsqueeze(0), x[1:, ::2]),
}


@pytest.mark.quick(backend=["openvino"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ALIASES)
def test_outputs_that_alias(name: str, backend: str) -> None:
    with torch.no_grad():
        report = assert_right(Lambda(ALIASES[name]).eval(), *two((4, 6)), backend=backend)
    assert not report.fallbacks and report.summary.coverage == 1.0


# These name a size, or count by one.
FIXED_SIZES = {"reshaped copy", "constants", "expanded", "windows"}


@pytest.mark.parametrize("name", [name for name in ALIASES if name not in FIXED_SIZES])
def test_outputs_that_alias_with_symbolic_sizes(name: str) -> None:
    with torch.no_grad():
        report = assert_right(ALIASES[name], *two((4, 6)), *two((6, 9)), dynamic=True)
    assert not report.fallbacks and report.summary.coverage == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_that_is_written_to_and_returned_is_itself(backend: str) -> None:
    compiled = tov.compile(Lambda(lambda x: (x.add_(1), x * 2, x)).eval(), backend=backend)
    with torch.no_grad():
        for _ in range(3):
            x = torch.zeros(3)
            first, double, again = compiled(x)
            assert first is x and again is x
            torch.testing.assert_close((x, double), (torch.ones(3), torch.full((3,), 2.0)))


def test_views_that_leave_the_graph_are_no_operators() -> None:
    compiled = tov.compile(lambda x: (x[:, 1:], x.t(), (x + 1)[:, ::2]))
    compiled(torch.randn(2, 4))
    assert compiled.report.summary.ops_total == 1 and compiled.report.summary.ops_on_openvino == 1


class Last(nn.Module):
    """Keeps its last input, as streaming models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) - self.last.mean()
        self.last.copy_(x)
        return y


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(0.9 * self.mean + 0.1 * x.mean(0))
        return x - self.mean


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [Last, Average])
def test_buffers_that_store_an_input(make: type[nn.Module], backend: str) -> None:
    torch.manual_seed(0)
    ours, eager = make().eval(), make().eval()
    eager.load_state_dict(ours.state_dict())
    compiled = tov.compile(ours, backend=backend)
    with torch.no_grad(), compiled.poisoned():
        for (x,) in two((2, 4)) * 2:
            torch.testing.assert_close(compiled(x), eager(x))
            torch.testing.assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))


@pytest.mark.parametrize(
    "body",
    [
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Linear(32, 4)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 8), nn.LayerNorm(8), nn.Softmax(-1)),
        lambda: nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)),
    ],
)
def test_training_has_eagers_answers_and_gradients(body: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    eager, ours = body(), body()
    ours.load_state_dict(eager.state_dict())
    compiled = tov.compile(ours)
    with compiled.poisoned():
        for (x,) in two((2, 8, 4, 4)):
            found = []
            for model, run in ((eager, eager), (ours, compiled)):
                model.zero_grad()
                y = run(x)
                y.pow(2).mean().backward()
                found.append([y.detach(), *(p.grad for p in model.parameters())])
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


# --- attention ----------------------------------------------------------------------------------------------------


def _mask(kind: str, dtype: torch.dtype, rows: Callable[[Tensor], None]) -> Tensor:
    allowed = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    rows(allowed)
    if kind == "bool":
        return allowed
    least = -torch.inf if kind == "inf" else torch.finfo(dtype).min
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, least)


def _left_padded(allowed: Tensor) -> None:
    allowed[0, :, :, :2] = False


def _closed(allowed: Tensor) -> None:
    allowed[1] = False


def _open(allowed: Tensor) -> None:
    allowed[:] = True


@pytest.mark.quick(backend=["openvino"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bool", "inf", "least"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_with_rows_that_may_see_nothing(kind: str, dtype: torch.dtype, backend: str) -> None:
    torch.manual_seed(0)
    model = Lambda(lambda q, m: functional.scaled_dot_product_attention(q, q, q, attn_mask=m) + 0).eval()
    compiled = tov.compile(model, backend=backend)
    with torch.no_grad(), compiled.poisoned():
        for rows in (_left_padded, _closed, _open, _left_padded):
            q, mask = torch.randn(2, 2, 4, 8).to(dtype), _mask(kind, dtype, rows)
            tolerance = 1e-5 if dtype is torch.float32 else 5e-2
            torch.testing.assert_close(compiled(q, mask), model(q, mask), atol=tolerance, rtol=0)
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


# --- indices, casts, divisions ------------------------------------------------------------------------------------


INDEXED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "two inputs": (lambda x, i, j: x[i, j], ([0, 3], [-1, -3])),
    "last token": (lambda x, n: x[torch.arange(x.shape[0]), n - 1], ([0, 3, 6, 1],)),
    "apart": (lambda x, i, j: x[i, :, j], ([-4, 1], [-1, 2])),
    "constant": (lambda x, i: x[i, torch.tensor([-2, 1])], ([2, -1],)),
    "wide": (lambda x, i, j: x[:, i, j], ([[-1], [2]], [[-1, 0]])),
    "computed": (lambda x, i: x[i * 2, i - 1], ([1, 0, -1],)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", INDEXED)
def test_indices_below_0(name: str, backend: str) -> None:
    function, indices = INDEXED[name]
    calls = [(x, *(torch.tensor(i) for i in indices)) for (x,) in two((4, 6, 5))]
    with torch.no_grad():
        report = assert_right(Lambda(function).eval(), *calls, backend=backend)
    assert not report.fallbacks and report.summary.coverage == 1.0


@pytest.mark.parametrize("name", ["two inputs", "last token", "computed"])
def test_indices_below_0_with_symbolic_sizes(name: str) -> None:
    function, indices = INDEXED[name]
    calls = [(x, *(torch.tensor(i) for i in indices)) for shape in ((4, 6, 5), (4, 8, 6)) for (x,) in two(shape)]
    with torch.no_grad():
        assert_right(function, *calls, dynamic=True)


WEIGHT = torch.arange(20.0).reshape(10, 2)
BEYOND: dict[str, tuple[Callable[..., Any], list[Any], list[Any]]] = {
    "embedding": (lambda i: functional.embedding(i + 1, WEIGHT), [8, 0], [9, 0]),
    "index": (lambda i: WEIGHT[i * 2], [4, -5], [5, 0]),
    "below": (lambda i: WEIGHT[i - 8], [0, 17], [-3, 0]),
    "gather": (lambda i: torch.gather(WEIGHT, 0, (i * 3)[:, None]), [3, 0], [4, 0]),
    "select": (lambda i: WEIGHT.index_select(0, i // 2), [19, 0], [20, 1]),
    "division": (lambda i: 7 // (i - 9), [8, 10], [9, 1]),
    "remainder": (lambda i: i % (i - 9), [8, 10], [9, 1]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BEYOND)
def test_what_eager_refuses_is_refused_however_it_was_computed(name: str, dynamic: bool) -> None:
    function, good, bad = BEYOND[name]
    compiled = tov.compile(function, dynamic=dynamic)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(torch.tensor(good)), function(torch.tensor(good)))
            with pytest.raises((IndexError, RuntimeError)):
                compiled(torch.tensor(bad))
    # With symbolic sizes gather stays in eager PyTorch unless the index is as large as the tensor.
    assert not compiled.report.fallbacks or (dynamic and name == "gather")


CAST: dict[str, tuple[Callable[[Tensor], Tensor], list[float], list[float]]] = {
    "to int64": (lambda x: x.long(), [-5.7, 1e9], [3e9]),
    "and computed with": (lambda x: (x * 2654435).long() % 1000, [1.0], [3777.0, 4999.0]),
    "to uint8": (lambda x: x.to(torch.uint8), [0.0, 255.0], [300.0]),
    "to float16": (lambda x: x.half() * 1, [1.5, -6e4], [70000.0, -1e5]),
}


@pytest.mark.parametrize("name", CAST)
def test_casts_beyond_the_type_run_in_eager_and_are_counted(name: str) -> None:
    function, good, bad = CAST[name]
    compiled = tov.compile(function)
    with torch.no_grad():
        assert torch.equal(compiled(torch.tensor(good)), function(torch.tensor(good)))
        assert not compiled.report.fallbacks
        assert torch.equal(compiled(torch.tensor(bad)), function(torch.tensor(bad)))
    assert compiled.report.fallback_counts() == {"runtime_failed": 1}


def test_a_cast_to_a_narrow_type_and_back_keeps_its_rounding() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        with torch.no_grad():
            report = assert_right(lambda x, dtype=dtype: x.to(dtype).reshape(-1).float() + 1, *two((3, 4)))
        assert "rounding" in report.fallbacks[0].reason


# --- NaN ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compare", [torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne])
def test_comparisons_with_nan_equal_eager(compare: Callable[..., Tensor]) -> None:
    x, y = torch.tensor([1.0, torch.nan, -1.0, torch.nan]), torch.tensor([torch.nan, 0.0, -1.0, torch.nan])
    with torch.no_grad():
        assert_right(lambda x, y: (compare(x, y), compare(x, 0.5), torch.where(compare(x, y), 1, 0)), (x, y), (y, x))


@pytest.mark.parametrize(
    "order", [lambda x: x.argmax(-1), lambda x: x.topk(2)[0], lambda x: x.sort()[0], lambda x: x.max(-1)[1]]
)
def test_nan_is_ordered_as_torch_does(order: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        assert_right(order, (torch.tensor([[1.0, torch.nan, 3.0]]),), (torch.tensor([[1.0, 2.0, 3.0]]),))


# --- layouts and shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(0).t(),
        lambda x: x.sum(0).transpose(0, 1) * 2,
        lambda x: x.mean(1, keepdim=True).permute(1, 0, 2) + 1,
        lambda x: x.amax(1).unsqueeze(0).permute(2, 1, 0).exp(),
        lambda x: x.relu().permute(2, 0, 1) + 1,
        lambda x: x.std(0).t().reshape(-1),
    ],
)
def test_symbolic_sizes_beside_a_dimension_of_1(function: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        report = assert_right(function, *two((3, 5, 1)), *two((4, 6, 1)), dynamic=True)
    assert not report.fallbacks


def test_a_wrong_shape_from_openvino_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchserve_openvino.backend.conversion import convert

    others = tuple(each for each in convert.FX_PASSES if each.name != "keep_reduced_dimensions")
    monkeypatch.setattr(convert, "FX_PASSES", others)
    with torch.no_grad():
        report = assert_right(lambda x: x.sum(0).t(), *two((3, 5, 1)), dynamic=True)
    assert report.fallback_counts() == {"runtime_failed": 2} and "shape" in report.fallbacks[0].reason


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("correction", [0, 1, 2, 1.3, 7])
def test_variances_with_any_correction(correction: float, backend: str) -> None:
    model = Lambda(lambda x: (x.var(1, correction=correction), x.std((0, 1), correction=correction), x.var()))
    with torch.no_grad():
        assert_right(model.eval(), *two((3, 4)), backend=backend)


@pytest.mark.parametrize("mode", ["linear", "bilinear", "bicubic", "trilinear"])
@pytest.mark.parametrize("backend", ["openvino", "export"])
def test_interpolation_to_a_size_of_1(mode: str, backend: str) -> None:
    dims = {"linear": 1, "trilinear": 3}.get(mode, 2)
    for size in ([1] * dims, [1, 2, 3][:dims]):
        model = Lambda(lambda x, size=size: functional.interpolate(x, size=size, mode=mode)).eval()
        with torch.no_grad():
            assert_right(model, *two((1, 2, *[6] * dims)), backend=backend)


def test_operators_of_other_namespaces_are_not_taken_on_trust() -> None:
    import torch.ao.quantization.fx._decomposed

    def cast(x: Tensor) -> Tensor:
        return torch.ops.quantized_decomposed.convert_element_type.no_fuse(x, torch.float32) + 1

    x = torch.arange(250, 256, dtype=torch.uint8)
    compiled = tov.compile(cast)
    torch.testing.assert_close(compiled(x), cast(x))
    found = {(fallback.kind, fallback.op) for fallback in compiled.report.fallbacks}
    assert ("unsupported_op", "quantized_decomposed.convert_element_type.no_fuse") in found
