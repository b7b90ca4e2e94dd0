"""From a model to graphs, by Dynamo or torch.export, and from a graph to a function."""
