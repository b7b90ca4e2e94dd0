"""Runs torch's operator database through this package: what ran on OpenVINO, what fell back and why, what was wrong."""
