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


@pytest.mark.many(2)
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
    assert {each.kind for each in compiled.report.fallbacks} <= {"disabled_op"}
    assert compiled.report.summary.ops_on_openvino
