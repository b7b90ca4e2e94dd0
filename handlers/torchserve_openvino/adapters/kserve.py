"""The former name of `torchserve_openvino.hosts.kserve`."""

import warnings

from torchserve_openvino.hosts.kserve import main

__all__ = ["main"]
warnings.warn(
    "torchserve_openvino.adapters.kserve is now torchserve_openvino.hosts.kserve. Change your configuration: "
    "the old one will be removed in the next release.",
    DeprecationWarning,
    stacklevel=2,
)

if __name__ == "__main__":
    main()
