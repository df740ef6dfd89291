"""Functions for NVIDIA's cards, and for those that torch drives as such."""
