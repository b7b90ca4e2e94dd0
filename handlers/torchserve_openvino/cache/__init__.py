"""On-disk cache of compiled models: entries are found by key, written atomically and verified before use."""
