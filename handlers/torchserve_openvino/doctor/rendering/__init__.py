"""A diagnosis as text, HTML and pictures."""
