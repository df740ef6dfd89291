"""Layers that only the families of this folder use."""
