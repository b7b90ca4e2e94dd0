"""`torchserve-openvino serve`: archives on one machine, without TorchServe and Java."""
