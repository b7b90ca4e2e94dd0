"""Average pooling, including the modes that OpenVINO computes differently, compared with eager PyTorch."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch.nn import functional as F

import torchserve_openvino as tov
from helpers import check

POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@settings(max_examples=40, deadline=None)
@given(st.data())
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.slow
def test_every_way_to_pool(dims: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(3, 9), min_size=dims, max_size=dims))
    kernel = data.draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims))
    stride = data.draw(st.lists(st.integers(1, 5), min_size=dims, max_size=dims))
    padding = [data.draw(st.integers(0, k // 2)) for k in kernel]
    # Eager's 3-d pooling compares the kernel with the size of the unpadded input.
    assume(all(size >= k for size, k in zip(sizes, kernel, strict=True)))
    options = {
        "ceil_mode": data.draw(st.booleans()),
        "count_include_pad": data.draw(st.booleans()),
    }
    if dims > 1:
        options["divisor_override"] = data.draw(st.sampled_from([None, 3]))
    x = torch.randn([2, 3, *sizes])
    torch._dynamo.reset()
    check(lambda x: POOLS[dims](x, kernel, stride, padding, **options), x)


def test_without_a_batch_and_with_one_number_for_all() -> None:
    check(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), torch.randn(3, 8, 9))
    check(lambda x: F.avg_pool2d(x, 2, ceil_mode=True), torch.randn(1, 3, 7, 7))


def test_infinities_stay_in_their_window() -> None:
    x = torch.randn(1, 1, 7, 7)
    x[0, 0, 3, 3] = float("inf")
    x[0, 0, 6, 6] = float("nan")
    check(lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True), x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_kernel_much_larger_than_its_input(dynamic: bool) -> None:
    """EfficientNet's last pool has a kernel of 2560; the input must not be padded to that."""
    for pool in (
        lambda x: F.avg_pool2d(x, 2560, ceil_mode=True),
        lambda x: F.avg_pool2d(x, (100, 2), (100, 2), ceil_mode=True, count_include_pad=False),
        lambda x: F.avg_pool2d(x, 2560, 2560, 1, ceil_mode=True),
    ):
        torch._dynamo.reset()
        compiled, x = tov.compile(pool, dynamic=dynamic, options={"min_partition_us": 0}), torch.randn(2, 8, 5, 7)
        torch.testing.assert_close(compiled(x), pool(x), rtol=1e-5, atol=1e-5)
        # Of open sizes it stays in eager.
        assert compiled.report.summary.coverage == (0.0 if dynamic else 1.0)
