"""The text tasks: texts are tokenised in a batch, and run padded to compiled lengths."""
