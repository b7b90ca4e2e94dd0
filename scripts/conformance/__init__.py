"""Torch's own operator database through this package: what ran on OpenVINO, what fell back and why, what was wrong."""
