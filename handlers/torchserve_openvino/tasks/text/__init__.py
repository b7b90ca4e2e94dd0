"""The text tasks: texts are tokenized in a batch, and run padded to compiled lengths."""
