"""Simulator: runs the engine's scheduler on a virtual clock, for a cluster that is not at hand or for the trace of a real run. It
does not import torch."""
