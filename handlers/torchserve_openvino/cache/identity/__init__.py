"""What an entry of the cache depends on."""
