"""What a run shows of itself: tables, progress, reports."""
