"""Which operator makes answers differ, by leaving some in eager PyTorch."""
