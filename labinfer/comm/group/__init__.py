"""Membership in the group of ranks: rendezvous, health checks, signals and shutdown."""
