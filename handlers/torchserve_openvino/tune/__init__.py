"""Finds the model-config.yaml that serves an archive best on this machine, by measuring and with evidence."""
