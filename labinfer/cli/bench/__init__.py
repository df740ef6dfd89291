"""Measuring an engine: requests, how they arrive, and what came of their times."""
