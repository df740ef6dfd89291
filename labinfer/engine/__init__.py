"""Engine: scheduling, KV-block allocation and speculative decoding on rank 0; plain Python, no torch."""
