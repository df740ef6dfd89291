"""Executes plans, on every rank: the model's share, its KV cache and, on the last stage, the sampler."""
