"""Measurements at startup: costs of steps, layers and links on the machines of this run."""
