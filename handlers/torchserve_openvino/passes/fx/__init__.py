"""Passes on torch.fx graphs: of a whole lowered graph, and of a partition before its conversion."""
