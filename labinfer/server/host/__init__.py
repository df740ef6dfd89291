"""Beside the engine on rank 0: the gateway's requests into the engines, tokens and stats back."""
