"""The life of a TorchServe worker, kept apart from the handler object, which is the user's."""
