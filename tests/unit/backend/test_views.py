"""Views between OpenVINO partitions and operators that stay in eager PyTorch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchserve_openvino as tov

# The function, and the operator in it that stays in eager.
VIEWED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a diagonal of an expanded value": (lambda x: x.softmax(1).expand(2, 2, 5, 6).diagonal(), "aten.diagonal"),
    "of which more is made": (lambda x: x.exp().expand(2, 2, 5, 6).diagonal().sin(), "aten.diagonal"),
    "an expanded value": (lambda x: (x[:1] * 2).expand(3, 5, 6).relu(), "aten.relu"),
    "a slice": (lambda x: (x * 2)[:, :, ::2].relu(), "aten.relu"),
    "a part of an expanded value": (lambda x: x.exp().unsqueeze(0).expand(3, 2, 5, 6)[:, 0], "aten.select"),
    "windows": (lambda x: (x * 2).transpose(0, 2)[::2].unfold(1, 2, 1), "aten.unfold"),
}
# Views that torch makes outside the partitions: they compute nothing, and do not count.
UNCOUNTED = {"aten.select", "aten.unfold"}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("name", VIEWED)
def test_an_operator_in_eager_has_eagers_strides(name: str, backend: str, dynamic: bool) -> None:
    function, in_eager = VIEWED[name]
    options = {"min_partition_us": 0, "disabled_ops": [in_eager]}
    compiled = tov.compile(function, backend=backend, dynamic=dynamic, options=options)
    with torch.no_grad():
        for x in (torch.randn(2, 5, 6), torch.randn(2, 5, 6)):
            got, expected = compiled(x), function(x)
            torch.testing.assert_close(got, expected)
            assert got.stride() == expected.stride()
    kinds = {each.kind for each in compiled.report.fallbacks}
    assert kinds == (set() if in_eager in UNCOUNTED else {"disabled_op"})
    assert compiled.report.summary.ops_on_openvino


class WritesLater(torch.nn.Module):
    """Writes in place to what a compiled graph returned."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        found = self.function(x)
        torch._dynamo.graph_break()
        found.mul_(2)
        return found + 1


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [torch.neg, torch.exp2, lambda x: x.softmax(1).sin()])
def test_a_result_in_another_memory_order_can_be_written_to(function, dynamic: bool, grad: bool) -> None:
    """Autograd refuses to write to a view that was made inside a compiled function."""
    model = WritesLater(function)
    compiled = tov.compile(model, dynamic=dynamic, options={"min_partition_us": 0})
    for shape in ((2, 3, 4, 5), (3, 3, 4, 5)):
        x = torch.randn(shape).contiguous(memory_format=torch.channels_last).requires_grad_(grad)
        got, expected = compiled(x), model(x)
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()
    assert {each.kind for each in compiled.report.fallbacks} == {"graph_break"}


@pytest.mark.parametrize("view", [
    lambda x: x, lambda x: x.view(-1), lambda x: x.t(), lambda x: x.reshape(6), lambda x: x[1:],
    lambda x: x.view(6)[2:],
])  # fmt: skip
@pytest.mark.parametrize("casts", [
    lambda x: x.long().int(), lambda x: x.float().double().float(), lambda x: x.double().float(),
])  # fmt: skip
def test_what_is_cast_and_cast_back_has_memory_of_its_own(view, casts) -> None:
    def forward(x: Tensor) -> Tensor:
        y = view(casts(x))
        x.add_(1)
        return y

    x = torch.zeros(2, 3, dtype=torch.int32 if casts(torch.zeros(1)).dtype is torch.int32 else torch.float32)
    expected, own = forward(x.clone()), x.clone()
    got = tov.compile(forward, options={"min_partition_us": 0})(own)
    torch.testing.assert_close(got, expected)
    got.zero_()
    assert own.eq(1).all()
