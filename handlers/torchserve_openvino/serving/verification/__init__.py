"""Checks that answers equal those of eager PyTorch, before READY and in production."""
