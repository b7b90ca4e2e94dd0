"""What was compiled, kept on disk: entries by key, complete or absent, each checked before it is used."""
