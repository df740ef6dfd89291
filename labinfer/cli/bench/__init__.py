"""Bench: benchmarks of an engine, their requests, arrival times and statistics."""
