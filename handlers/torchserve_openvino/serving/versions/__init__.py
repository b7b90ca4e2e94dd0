"""Versions that this package was not tested with: a start tries what it relies on, then warns or refuses."""
