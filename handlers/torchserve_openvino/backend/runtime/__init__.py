"""From an ov.Model to results: compilation, memory, inference, comparison."""
