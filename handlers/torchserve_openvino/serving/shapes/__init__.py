"""What inputs a model takes, and which shapes are compiled."""
