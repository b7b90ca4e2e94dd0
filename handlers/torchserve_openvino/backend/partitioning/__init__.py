"""Decides which pieces of a graph run on OpenVINO, and splits the graph into them."""
