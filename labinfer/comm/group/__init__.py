"""Membership in the group of ranks: how they meet, what signals mean, and how all end together."""
