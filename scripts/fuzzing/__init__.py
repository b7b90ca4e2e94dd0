"""The composition fuzzer: runs random models through this package and compares them with eager PyTorch."""
