"""Decides which sequence runs when, and on which blocks. Never imports torch: everything here is plain Python."""
