"""The versions of torch for which a contract holds."""

import pytest
import torch
from packaging.version import Version

TORCH = Version(torch.__version__).release


def until(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    """Marks a test that holds before a version of torch, which changed what it pins."""
    return pytest.mark.skipif((major, minor) <= TORCH, reason=f"torch {major}.{minor}: {what}")


def since(major: int, minor: int) -> pytest.MarkDecorator:
    """Marks a test that holds from a version of torch on."""
    return pytest.mark.skipif((major, minor) > TORCH, reason=f"before torch {major}.{minor}")
