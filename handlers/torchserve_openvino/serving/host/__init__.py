"""What a handler needs of its host, where that is not TorchServe: its base, a context, metrics."""
