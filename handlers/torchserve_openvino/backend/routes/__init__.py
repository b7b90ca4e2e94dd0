"""Recorded calls: frozen models, and what a cache keeps of them."""
