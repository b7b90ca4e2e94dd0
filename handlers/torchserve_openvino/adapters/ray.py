"""The former name of `torchserve_openvino.hosts.ray`."""

import warnings

from torchserve_openvino.hosts.ray import app

__all__ = ["app"]
warnings.warn(
    "torchserve_openvino.adapters.ray is now torchserve_openvino.hosts.ray. Change your configuration: "
    "the old one will be removed in the next release.",
    DeprecationWarning,
    stacklevel=2,
)
