"""Keys of cache entries: everything that an entry depends on."""
