"""The commands that measure servers."""
