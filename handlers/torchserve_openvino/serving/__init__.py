"""The TorchServe lifecycle around the backend: load, compile, warm up, verify, serve."""
