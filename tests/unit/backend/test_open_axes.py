"""One graph for all sizes of the open axes."""

import pytest
import torch
from torch import nn

from helpers import assert_same
from torchserve_openvino.backend import OpenAxes
from torchserve_openvino.backend.compiler import CompileSpec, compile_with

SIZES = (1, 3, 2, 8, 1)


class Attention(nn.Module):
    """Positional and keyword inputs, a mask, an output that is an input, one that does not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(8), nn.Linear(8, 24)

    def forward(self, x, mask=None):
        y = self.norm(x)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.heads(y).chunk(3, dim=-1))
        z = nn.functional.scaled_dot_product_attention(q, k, v, ~mask[:, None, None])
        z = z.transpose(1, 2).flatten(2)
        return x, z, z.mean(1), self.norm.weight * 2, y.reshape(-1, 8)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.norm(self.conv(x)).relu()
        return nn.functional.adaptive_avg_pool2d(y, 1).flatten(1), nn.functional.interpolate(y, scale_factor=2)


def check_call(compiled, model, args, kwargs) -> None:
    with torch.no_grad():
        assert_same(compiled(*args, **kwargs), model(*args, **kwargs))


@pytest.mark.parametrize(("frozen", "backend"), [(False, "openvino"), (True, "openvino"), (False, "openvino_ts")])
def test_one_graph_for_all_batch_sizes(frozen, backend) -> None:
    cases = [
        (Attention().eval(), {0: (0,), "mask": (0,)}, lambda n: ((torch.randn(n, 5, 8),),
                                                                 {"mask": (torch.arange(5) > 2).repeat(n, 1)})),
        (Pictures().eval(), {"x": (0,)}, lambda n: ((), {"x": torch.randn(n, 3, 9, 9)})),
    ]  # fmt: skip
    for model, axes, make in cases:
        compiled = compile_with(model, CompileSpec(open_axes=OpenAxes(axes), backend=backend))
        if frozen:
            compiled.freeze()
        for size in SIZES:
            args, kwargs = make(size)
            for _ in range(2):
                with compiled.poisoned():
                    check_call(compiled, model, args, kwargs)
            assert all(not vars(tensor) for tensor in (*args, *kwargs.values())), "marks stayed"
        summary = compiled.report.summary
        assert summary.graphs == 1 and summary.recompiles == 0 and summary.fallbacks == 0
        assert summary.coverage == 1.0, compiled.report.to_text()


def test_lengths_too() -> None:
    model = Attention().eval()
    compiled = compile_with(model, CompileSpec(open_axes=OpenAxes({"x": (0, 1), "mask": (0, 1)})))
    for size, length in ((2, 5), (1, 9), (4, 2), (1, 3)):
        mask = torch.zeros(size, length, dtype=torch.bool)
        mask[:, length // 2 + 1 :] = True
        check_call(compiled, model, (), {"x": torch.randn(size, length, 8), "mask": mask})
    assert compiled.report.summary.graphs == 1


def test_a_layer_that_tells_one_item_from_others_has_two_graphs() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.heads(x, x, x, need_weights=False)[:1]

    for sizes in (SIZES, (8, 3, 1, 2)):
        model = Layer().eval()
        compiled = compile_with(model, CompileSpec(open_axes=OpenAxes({0: (0,)})))
        for size in sizes:
            check_call(compiled, model, (torch.randn(size, 5, 8),), {})
        assert compiled.report.summary.graphs == 2 and compiled.report.summary.coverage == 1.0


def test_a_model_that_asks_for_a_size_has_a_graph_for_each_answer() -> None:
    def model(x):
        return (x * 2 if x.shape[0] == 3 else x + 1,)

    compiled = compile_with(model, CompileSpec(open_axes=OpenAxes({0: (0,)})))
    for size in SIZES:
        check_call(compiled, model, (torch.randn(size, 4),), {})
    assert compiled.report.summary.graphs == 2


def test_the_callers_own_mark_is_left_alone() -> None:
    compiled, x = compile_with(lambda x: x + 1, CompileSpec(open_axes=OpenAxes({0: (0,)}))), torch.randn(2, 4)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    before = dict(vars(x))
    compiled(x)
    assert vars(x) == before


def test_an_error_leaves_no_marks() -> None:
    compiled, x = (
        compile_with(lambda x: x @ torch.ones(3), CompileSpec(open_axes=OpenAxes({0: (0,)}))),
        torch.randn(2, 4),
    )
    with pytest.raises(RuntimeError):
        compiled(x)
    assert not vars(x)


def test_names_and_axes_that_a_call_lacks_are_passed_over() -> None:
    model = Attention().eval()
    compiled = compile_with(model, CompileSpec(open_axes=OpenAxes({0: (0,), 3: (0,), "mask": (0, 5), "none": (0,)})))
    check_call(compiled, model, (torch.randn(2, 5, 8),), {"mask": torch.zeros(2, 5, dtype=torch.bool)})


def test_plain_axes_are_sorted() -> None:
    assert OpenAxes({"b": (1, 0), 0: (0,)}).to_plain() == [True, [["0", [0]], ["b", [0, 1]]]]


def test_one_item_may_keep_a_graph_of_its_own() -> None:
    model = Pictures().eval()
    compiled = compile_with(model, CompileSpec(open_axes=OpenAxes({0: (0,)}, ones=False))).freeze()
    for size in SIZES:
        for _ in range(2):
            check_call(compiled, model, (torch.randn(size, 3, 9, 9),), {})
    assert [graph["dynamic"] for graph in compiled.report.to_dict()["graphs"]] == [False, True]
    assert compiled.frozen == len(set(SIZES)), compiled.guarded_reasons
