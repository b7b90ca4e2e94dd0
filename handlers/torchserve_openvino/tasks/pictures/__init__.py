"""Image generation."""
