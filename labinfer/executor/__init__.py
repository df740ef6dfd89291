"""Joins engine and workers: this rank's membership in its group, and the executor that the engine drives."""
