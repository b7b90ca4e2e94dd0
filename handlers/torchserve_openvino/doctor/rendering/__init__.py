"""Renders a diagnosis as text, HTML and pictures."""
