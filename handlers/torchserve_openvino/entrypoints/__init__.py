"""The files that torch-model-archiver --handler takes: TorchServe wants exactly one class in each."""
