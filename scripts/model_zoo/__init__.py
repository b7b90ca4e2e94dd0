"""Runs published model architectures, small and with random weights, beside eager PyTorch."""
