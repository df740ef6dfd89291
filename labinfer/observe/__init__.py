"""Observe: text tables, progress lines, traces, energy, and the report at the end of a run."""
