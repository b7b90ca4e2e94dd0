"""The vision tasks of Hugging Face models."""
