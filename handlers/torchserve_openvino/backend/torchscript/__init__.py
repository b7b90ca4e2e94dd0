"""Rewrites TorchScript as Python, which torch.compile can trace: first stage for scripted and traced modules."""
