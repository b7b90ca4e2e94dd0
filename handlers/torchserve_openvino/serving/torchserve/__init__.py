"""TorchServe: its base of handlers, calls of its workers, and what stands in its place where it is not installed."""
