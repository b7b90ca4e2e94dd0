"""Named dimensions, batching and related keys of the YAML: accepted values and error messages."""

import pytest

from torchserve_openvino.config import load_serving_config
from torchserve_openvino.errors import ConfigError

IDS = {"name": "ids", "shape": ["sequence"], "dtype": "int64"}


def section(**openvino):
    return load_serving_config({"handler": {"openvino": openvino}}).openvino


def test_the_batch_may_stand_before_a_shape() -> None:
    made = section(warmup={"inputs": [{**IDS, "shape": ["batch", "sequence"]}]}, batching={"dims": {"sequence": [8]}})
    assert made.warmup.inputs[0].item_shape() == ("sequence",)


@pytest.mark.parametrize(
    ("given", "lengths"), [(128, [16, 32, 64, 128]), (100, [16, 32, 64, 100]), (8, [8]), ([64, 8, 64], [8, 64])]
)
def test_lengths_are_a_list_or_the_largest(given, lengths) -> None:
    assert (
        section(warmup={"inputs": [IDS]}, batching={"dims": {"sequence": given}}).batching.dims["sequence"] == lengths
    )


@pytest.mark.parametrize(
    ("openvino", "words"),
    [
        ({"warmup": {"inputs": [IDS]}}, "names the dimension 'sequence'.*dims: {sequence: "),
        ({"warmup": {"inputs": [IDS]}, "batching": {"dims": {"sequense": [8]}}}, "Did you mean 'sequense'"),
        ({"batching": {"dims": {"sequence": [8]}}}, "no shape in warmup.inputs names"),
        ({"warmup": {"inputs": [{"shape": [4, "batch"]}]}}, "batch must be the first"),
        ({"warmup": {"inputs": [{"shape": [], "mask": True}]}}, "mask: true needs a shape with the length"),
        ({"warmup": {"inputs": [{"shape": ["a b"]}]}}, "name of a free dimension"),
        ({"warmup": {"inputs": [IDS]}, "batching": {"dims": {"sequence": [0]}}}, "at least 1"),
        ({"batching": {"outside": "pad"}}, "refuse.*compile"),
        ({"outputs": {"non_finite": "reject"}}, "allow.*refuse"),
        ({"verify": {"min_cosine": 2}}, "verify.min_cosine"),
        ({"execution": {"mode": "throughputt"}}, "Did you mean 'throughput'"),
        ({"warmup": {"inputs": [{**IDS, "dtype": "float"}]}}, "Did you mean 'float32'"),
        ({"image": {"fold": True}, "warmup": {"inputs": [{"shape": [4]}]}}, "remove warmup.inputs"),
        ({"freeze": "maybe"}, "handler.openvino.freeze"),
    ],
)
def test_what_can_not_be_meant_is_told(openvino, words) -> None:
    with pytest.raises(ConfigError, match=words):
        section(**openvino)
