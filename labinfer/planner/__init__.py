"""Planner: exact search for the best layout of a model over unequal machines, from measured costs. It does not import torch."""
