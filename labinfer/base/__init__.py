"""Plain data, options and errors that every package may use; no torch."""
