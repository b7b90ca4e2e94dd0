"""Writes to slices and rows (`slice_scatter`, `select_scatter`) of every type, with static and symbolic sizes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchserve_openvino as tov
from helpers import check

ALL = {"min_partition_us": 0}
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def _nested(x: Tensor, values: Tensor) -> Tensor:
    """As longformer copies the diagonals of its chunks."""
    y = torch.zeros_like(x) + x
    y[:, :-1, :, 8:] = values
    y[:, -1, :, 8:] = values[:, -1]
    y[:, 1:, :, :8] = values[..., 1:]
    y[:, ::2] = 1
    y[:, 3::3] += 2
    y[:, :, -2:] *= 2
    return y + 1


def _plain(x: Tensor, values: Tensor) -> Tensor:
    y = x.clone()
    y[:, 2:-3] = values[:, :4]
    y[:, -1] = values[:, 0]
    y[1] = values[0, 0]
    y[:, ::3] = x[:, 1:4]
    return y


def _window_mask(x: Tensor) -> Tensor:
    """As Swin numbers the regions of its shifted windows."""
    regions, count = torch.zeros(1, *x.shape[1:3], 1), 0
    parts = (slice(0, -7), slice(-7, -3), slice(-3, None))
    for rows in parts:
        for columns in parts:
            regions[:, rows, columns] = count
            count += 1
    return x + regions


def _by_length(x: Tensor) -> Tensor:
    half, y = x.shape[1] // 2, x.clone()
    y[:, half:] = x[:, : x.shape[1] - half] * 2
    y[:, half] = 7
    y[:, -half:] = y[:, :half]
    return y


@pytest.mark.parametrize("dynamic", [False, True])
def test_nested_writes_are_one_partition(dynamic: bool) -> None:
    compiled = check(_nested, torch.randn(4, 8, 8, 17), torch.randn(4, 7, 8, 9), dynamic=dynamic, options=ALL)
    assert compiled.report.summary.partitions == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_writes_in_every_type(dtype: torch.dtype, dynamic: bool) -> None:
    x, values = (torch.randn(3, 9, 7).mul(9).to(dtype) for _ in range(2))
    check(_plain, x, values, dynamic=dynamic, options=ALL)


@pytest.mark.parametrize("dynamic", [False, True])
def test_regions_of_shifted_windows(dynamic: bool) -> None:
    compiled = check(_window_mask, torch.randn(2, 28, 28, 96), dynamic=dynamic, options=ALL)
    check(_window_mask, torch.randn(2, 35, 21, 96), compiled=compiled)


def test_bounds_that_depend_on_sizes() -> None:
    compiled = check(_by_length, torch.randn(2, 500, 128), dynamic=True, options=ALL)
    check(_by_length, torch.randn(3, 333, 128), compiled=compiled)


def test_an_exported_graph() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, values: Tensor) -> Tensor:
            return _plain(x, values)

    model, inputs = Model().eval(), (torch.randn(3, 9, 7), torch.randn(3, 9, 7))
    check(model, *inputs, compiled=tov.compile(model, backend="export", options=ALL))


def test_padding_in_a_circle_keeps_its_size() -> None:
    """A slice that ended at 2^31 - 1 gave OpenVINO bounds of sizes above what it can count."""
    for dynamic in (False, True):
        compiled = check(
            lambda x: torch.nn.functional.pad(x, (1, 2), "circular"), torch.randn(1, 4, 6), dynamic=dynamic
        )
        check(compiled.eager, torch.randn(1, 4, 9), compiled=compiled)


def _all_of_it(x: Tensor, values: Tensor) -> Tensor:
    return torch.slice_scatter(x * 2, values * 3, 0, 0, 2**63 - 1) + 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_slice_of_all_replaces_the_tensor(dynamic: bool) -> None:
    report = check(_all_of_it, torch.randn(5, 4), torch.randn(5, 4), dynamic=dynamic, options=ALL).report
    assert report.summary.coverage == 1.0 and not report.fallbacks
    check(_all_of_it, torch.randn(4, 5).t(), torch.randn(5, 4), dynamic=dynamic, options=ALL)
    check(_all_of_it, torch.randint(9, (5, 4)), torch.randint(9, (5, 4)), dynamic=dynamic, options=ALL)


def _sizes_alone(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Of `x` the sizes count, of `z` nothing: its slice is overwritten."""
    return torch.ones_like(x * 2) + torch.slice_scatter(z + 1, y, 1, 0, 2**63 - 1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_inputs_whose_values_do_not_count_stay_inputs(dynamic: bool, cache: bool, tmp_path: Path) -> None:
    options = {**ALL, "model_caching": True, "cache_dir": str(tmp_path)} if cache else ALL
    for _ in range(2):
        torch._dynamo.reset()
        compiled = check(_sizes_alone, *torch.randn(3, 5, 4), dynamic=dynamic, options=options)
        check(_sizes_alone, *torch.randn(3, 5, 4), compiled=compiled)
        assert compiled.report.summary.coverage == 1.0


def _by_steps(x: Tensor, values: Tensor, start: int, step: int) -> Tensor:
    return torch.slice_scatter(x * 2, values, 1, start, x.shape[1], step) + 1


def test_start_and_step_may_be_symbolic() -> None:
    compiled = check(_by_steps, torch.randn(3, 20), torch.randn(3, 5), 10, 2, dynamic=True, options=ALL)
    check(_by_steps, torch.randn(3, 20), torch.randn(3, 6), 2, 3, compiled=compiled)
    check(_by_steps, torch.randn(3, 20), torch.randn(3, 16), 4, 1, compiled=compiled)
