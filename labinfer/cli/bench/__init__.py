"""Bench: benchmarks of an engine: requests, their arrivals, and statistics of their times."""
