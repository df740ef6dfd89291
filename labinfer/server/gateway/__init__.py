"""The HTTP process: OpenAI's API and the web pages, served on behalf of an engine host (rank 0). It imports no torch."""
