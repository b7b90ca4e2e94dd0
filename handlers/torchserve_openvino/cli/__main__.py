"""``python -m torchserve_openvino.cli``, where the console script is not on the path."""

from torchserve_openvino.cli import main

main()
