"""The OpenAI-compatible server: a gateway process for HTTP, and the engine's side of it on rank 0."""
