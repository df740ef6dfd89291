"""Supervisor: restarts a group of ranks when it dies, behind a gateway that outlives it."""
