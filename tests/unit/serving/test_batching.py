"""Buckets, padding, threads and the comparison with eager."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchserve_openvino.serving.batching import BucketedModel, bucket_sizes
from torchserve_openvino.serving.threads import threads_for, usable_cores
from torchserve_openvino.serving.verify import compare


@pytest.mark.parametrize(
    ("buckets", "batch_size", "sizes"),
    [("auto", 1, [1]), ("auto", 8, [1, 2, 4, 8]), ("auto", 6, [1, 2, 4, 6]), ([2], 4, [2, 4]), ([4, 1], 4, [1, 4])],
)
def test_bucket_sizes(buckets, batch_size, sizes) -> None:
    assert bucket_sizes(buckets, batch_size) == sizes


@given(batch=st.integers(1, 9), largest=st.integers(1, 8))
def test_padding_never_changes_an_answer(batch: int, largest: int) -> None:
    seen = []

    def model(x, *, scale):
        seen.append(x.shape[0])
        return {"y": x * scale, "n": 3}

    sizes = bucket_sizes("auto", largest)
    x, scale = torch.randn(batch, 2), torch.randn(batch, 1)
    answer = BucketedModel(model, sizes)(x, scale=scale)
    assert torch.equal(answer["y"], x * scale) and answer["n"] == 3
    assert seen == [min((size for size in sizes if size >= batch), default=batch)]


def test_a_model_that_reduces_over_the_batch_is_not_padded() -> None:
    model = BucketedModel(lambda x: x.sum(), [4])
    x = torch.randn(3, 2)
    assert torch.equal(model(x), x.sum())
    assert torch.equal(model(x), x.sum())


def test_inputs_of_different_first_dimensions_are_not_padded() -> None:
    model = BucketedModel(lambda x, table: x @ table, [4])
    x, table = torch.randn(3, 2), torch.randn(2, 5)
    assert torch.equal(model(x, table), x @ table)


def test_threads() -> None:
    assert threads_for(3, 8) == 3
    assert threads_for("auto", 10**6) == 1
    assert threads_for("auto", 1) == usable_cores() >= 1


BATCH = [((torch.tensor([[1.0, 2.0], [3.0, -1.0]]),), {})]


def test_compare_figures() -> None:
    same = compare(lambda x: x * 2, lambda x: x * 2, BATCH, precision="f32", max_abs=None)
    assert (
        same["passed"] and same["max_abs"] == 0 and same["cosine"] == pytest.approx(1) and same["top1_agreement"] == 1
    )
    off = compare(lambda x: x * 2 + 0.5, lambda x: x * 2, BATCH, precision="f32", max_abs=None)
    assert not off["passed"] and off["max_abs"] == pytest.approx(0.5)
    assert compare(lambda x: x + 0.5, lambda x: x, BATCH, precision="f32", max_abs=0.6)["passed"]
    flipped = compare(lambda x: -x, lambda x: x, BATCH, precision="f32", max_abs=100.0)
    assert flipped["top1_agreement"] == 0.0 and flipped["cosine"] == pytest.approx(-1)


def test_compare_refuses_nan_shape_and_type() -> None:
    assert not compare(lambda x: x / 0 * 0, lambda x: x, BATCH, precision="f32", max_abs=1e9)["passed"]
    assert not compare(lambda x: x[:1], lambda x: x, BATCH, precision="f32", max_abs=1e9)["passed"]
    assert not compare(lambda x: x.half(), lambda x: x, BATCH, precision="f32", max_abs=1e9)["passed"]
    assert compare(lambda x: x / 0, lambda x: x / 0, BATCH, precision="f32", max_abs=None)["passed"]
