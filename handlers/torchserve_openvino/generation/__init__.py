"""Text and images that a model makes step by step. Knows nothing of TorchServe: tasks/ serves it."""
