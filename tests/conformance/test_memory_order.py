"""Decompositions lay out their results as eager does, on op_db's samples in several memory orders."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.backend_settings import BackendSettings
from torchserve_openvino.config import resolve_options
from torchserve_openvino.ops.mappings import Mappings
from torchserve_openvino.report import Tracker

OPS = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
# They draw random numbers, or write to their inputs, which no lowered graph does.
LEFT_OUT = {"normal", "_batch_norm_with_update", "_native_batch_norm_legit", "native_batch_norm"}


def turned(value: Any, last_first: bool) -> Any:
    if not isinstance(value, Tensor) or value.dim() < 2 or value.layout is not torch.strided:
        return value
    order = [*range(value.dim())][::-1] if last_first else [*range(1, value.dim()), 0]
    back = sorted(order, key=order.__getitem__)
    return value.detach().permute([back.index(d) for d in range(value.dim())]).contiguous().permute(back)


def calls(op: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yields each sample as a function and its tensors: in two memory orders, and with the input's first row only."""
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), 4):
        whole = (sample.input, sample.args, sample.kwargs)
        row = (pytree.tree_map_only(Tensor, lambda t: t[:1] if t.dim() > 1 else t, sample.input), *whole[1:])
        for given, last_first in ((whole, True), (whole, False), (row, True)):
            flat, spec = pytree.tree_flatten(pytree.tree_map(functools.partial(turned, last_first=last_first), given))
            places = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]

            def run(*tensors: Tensor, flat=flat, spec=spec, places=places) -> Any:
                values = dict(zip(places, tensors, strict=True))
                x, args, kwargs = pytree.tree_unflatten([values.get(i, v) for i, v in enumerate(flat)], spec)
                return op.op(x, *args, **kwargs)

            yield run, [flat[i] for i in places]


def order_of(tensor: Tensor) -> list[int] | None:
    if tensor.layout is not torch.strided:
        return None
    known = all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride()))
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1] if known else None


@pytest.fixture(scope="module")
def table() -> dict[Any, Any]:
    return BackendSettings(resolve_options({}), Tracker(), mappings=Mappings()).decompositions


# Those with a decomposition of their own here, one for each way to lay out a result.
QUICK = [
    "H", "abs", "add", "addmm", "amax", "angle", "argmax", "atan2", "bmm", "cat", "clamp", "copysign", "cummax",
    "cumsum", "diagonal", "div.trunc_rounding", "einsum", "empty_strided", "expand", "expm1", "fft.fft", "flip",
    "fmod", "full_like", "gather", "hypot", "index_add", "index_put", "index_select", "isnan", "linalg.cross",
    "log_softmax", "logaddexp", "logsumexp", "masked_fill", "matmul", "max.reduction_with_dim", "mean",
    "movedim", "nn.functional.avg_pool2d", "nn.functional.batch_norm", "nn.functional.conv2d",
    "nn.functional.gelu", "nn.functional.group_norm", "nn.functional.interpolate.bilinear",
    "nn.functional.layer_norm", "nn.functional.logsigmoid", "nn.functional.max_pool2d",
    "nn.functional.pad.reflect", "nn.functional.pixel_unshuffle", "nn.functional.softplus", "permute", "pow",
    "remainder", "reshape", "roll", "rot90", "scatter_add", "select_scatter", "softmax", "sort", "split",
    "squeeze", "std_mean", "sum", "take_along_dim", "topk", "tril", "unfold", "var", "view", "where",
    "zeros_like",
]  # fmt: skip


@pytest.mark.quick(name=QUICK)
@pytest.mark.parametrize("name", sorted(name for name in OPS.keys() - LEFT_OUT if not name.startswith("sparse.")))
def test_decompositions_keep_to_the_order_of_memory(name: str, table: dict[Any, Any]) -> None:
    looked_at = 0
    for run, tensors in calls(OPS[name]):
        try:
            wanted = run(*tensors)
            traced = make_fx(run, decomposition_table=table, tracing_mode="fake")(*tensors)
        except (ArithmeticError, AssertionError, IndexError, RuntimeError, TypeError, ValueError):
            # The arguments are invalid in this shape, or the operator has no fake tensor support.
            continue
        (output,) = traced.graph.find_nodes(op="output")
        found = [
            leaf.meta.get("val") if isinstance(leaf, torch.fx.Node) else leaf
            for leaf in pytree.tree_leaves(output.args[0])
        ]
        for mine, its in zip(found, pytree.tree_leaves(wanted), strict=True):
            if (
                isinstance(mine, Tensor)
                and isinstance(its, Tensor)
                and its.numel()
                and None not in (orders := (order_of(mine), order_of(its)))
            ):
                assert orders[0] == orders[1], [t.stride() for t in tensors]
                looked_at += 1
    if not looked_at:
        pytest.skip("nothing that can be traced on fake tensors")
