"""Which pieces of a graph run on OpenVINO, and how they are put together again."""
