"""Passes on OpenVINO models: behind the conversion, and before a model is compiled for a device."""
