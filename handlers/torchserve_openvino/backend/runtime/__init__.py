"""From an ov.Model to answers: compiling, memory, inference, comparison."""
