"""Measures servers under load: Poisson arrivals, latencies from the scheduled time, claims with their confidence."""
