"""Simulator: the engine on a virtual clock, for clusters that are not at hand and traces of real runs; no torch."""
