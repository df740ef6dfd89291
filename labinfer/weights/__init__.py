"""From checkpoint files to the slices a rank holds."""
