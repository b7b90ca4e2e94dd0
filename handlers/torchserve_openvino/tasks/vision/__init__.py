"""The vision tasks: pictures are prepared by the model's own image processor, in one compiled shape."""
