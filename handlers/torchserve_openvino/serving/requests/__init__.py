"""Handles batches of requests: joins, splits, and runs them one by one after a failure."""
