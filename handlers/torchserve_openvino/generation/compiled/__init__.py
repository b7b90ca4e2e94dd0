"""Runs the `generate` of a model of transformers by compiled graphs: encoder, prompt in lengths, one step."""
