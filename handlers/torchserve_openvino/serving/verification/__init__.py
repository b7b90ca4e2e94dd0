"""Whether answers are those of eager PyTorch, before READY and in production."""
