"""The composition fuzzer: random models through this package, compared with eager PyTorch."""
