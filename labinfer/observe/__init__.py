"""Observe: tables, progress lines, traces, and the report at the end of a run."""
