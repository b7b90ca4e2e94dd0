"""What a handler's own code does with its models."""
