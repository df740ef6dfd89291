"""Measurements at the start of a model: what steps, layers and links cost on these machines."""
