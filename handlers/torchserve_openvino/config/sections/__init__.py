"""The sections of `handler.openvino`, each with its keys, their types, defaults, bounds and help."""
