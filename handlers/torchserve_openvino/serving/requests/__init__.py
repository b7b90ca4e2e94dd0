"""A batch of requests: joined, split, answered one by one after a failure."""
