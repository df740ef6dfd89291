"""Loading of weights: from checkpoint files to the slices that a rank holds."""
