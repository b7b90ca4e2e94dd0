"""Corrections to a lowered graph before it is converted."""
