"""The cache's folder on disk: objects, manifests, locks, bundles."""
