"""Loads an eager model from an archive."""
