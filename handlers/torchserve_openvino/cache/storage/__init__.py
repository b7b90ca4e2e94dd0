"""The folder: objects, manifests, locks, bundles."""
