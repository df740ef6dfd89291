"""The engine on a virtual clock: for clusters that nobody here has, and for traces of real runs; no torch."""
