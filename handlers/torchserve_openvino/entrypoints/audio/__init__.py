"""The audio tasks of Hugging Face models."""
