"""Makes models of 8 or 4 bits while an archive is packaged, and proves their accuracy."""
