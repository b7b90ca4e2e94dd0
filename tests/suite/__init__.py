"""Which tests run: the quick suite, fast ones, and parts that take equally long."""
