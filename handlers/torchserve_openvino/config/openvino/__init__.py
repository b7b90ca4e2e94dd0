"""Devices and properties, checked against the installed OpenVINO."""
