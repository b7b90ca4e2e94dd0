"""Serves archives made for TorchServe on other hosts: Ray Serve and KServe."""
