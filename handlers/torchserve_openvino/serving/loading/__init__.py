"""From an archive to an eager model."""
