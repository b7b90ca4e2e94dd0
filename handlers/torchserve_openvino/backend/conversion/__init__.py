"""Converts one partition of a graph to one ov.Model."""
