"""Times and sizes as people write them."""

from typing import Any

import pytest

from torchserve_openvino.config import load_serving_config
from torchserve_openvino.config.fields import bytes_of, seconds_of
from torchserve_openvino.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("1 d", 86400), (2, 2), (0.5, 0.5)]
)
def test_seconds(value: Any, seconds: float) -> None:
    assert seconds_of(value) == seconds


@pytest.mark.parametrize("value", ["10", "m", "-1s", "0s", "1000d", "1w", True, 0, -1, None, [], float("nan"), 10**400])
def test_no_time(value: Any) -> None:
    with pytest.raises(ValueError, match="must be a time such as 90s, 10m or 2h"):
        seconds_of(value)


@pytest.mark.parametrize(
    ("value", "size"), [("8GB", 8 * 10**9), ("4GiB", 4 << 30), ("500 mb", 5 * 10**8), ("1000", 1000)]
)
def test_bytes(value: str, size: int) -> None:
    assert bytes_of(value) == size


@pytest.mark.parametrize("value", ["", "GB", "8XB", "-1GB", "0", "9" * 40])
def test_no_size(value: str) -> None:
    with pytest.raises(ValueError, match="must be a size such as 500MB"):
        bytes_of(value)


def test_keep_is_a_key() -> None:
    assert load_serving_config({"handler": {"openvino": {"keep": "10m"}}}).openvino.keep == 600
    assert load_serving_config({}).openvino.keep is None
    with pytest.raises(ConfigError, match=r"handler.openvino.keep: must be a time such as 90s, 10m or 2h"):
        load_serving_config({"handler": {"openvino": {"keep": "soon"}}})
