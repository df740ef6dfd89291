"""Planner: layouts of a model over unequal machines, from measured costs by an exact search; no torch."""
