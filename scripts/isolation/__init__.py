"""Runs tasks in processes of their own: a crash or a hang costs one task."""
