"""The text tasks of Hugging Face models."""
