"""Keeping a group of ranks alive: it is started again when it dies, and the gateway outlives it."""
