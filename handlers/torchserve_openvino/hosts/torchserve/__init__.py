"""What handlers that users write for TorchServe need."""
