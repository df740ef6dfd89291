"""Worker: executes plans on every rank: model runner, KV cache and, on the last stage, the sampler."""
