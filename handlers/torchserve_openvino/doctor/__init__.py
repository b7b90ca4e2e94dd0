"""What is wrong with a model on OpenVINO, where, and what to do about it."""
