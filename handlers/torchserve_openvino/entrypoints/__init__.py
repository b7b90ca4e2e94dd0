"""The files for torch-model-archiver --handler; TorchServe expects exactly one class in each."""
