"""The HTTP process: OpenAI's API and the pages, in front of an engine host. It imports no torch."""
