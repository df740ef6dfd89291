"""Layout: the layers, weights and KV blocks of each rank, computed before anything is loaded."""
