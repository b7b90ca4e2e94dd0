"""Captures a model as graphs with Dynamo or torch.export, and turns each graph into a function."""
