"""One piece of a graph to one ov.Model."""
