"""Image generation with diffusers' pipelines; knows nothing of TorchServe."""
