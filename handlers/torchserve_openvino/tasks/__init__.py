"""One file per task: how requests become tensors, and tensors become answers."""
