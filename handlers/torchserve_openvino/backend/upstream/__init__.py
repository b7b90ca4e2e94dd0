"""Wrappers around private modules of torch and OpenVINO; tests/contract pins what they rely on."""
