"""Recorded calls of frozen models, and their entries in the cache."""
