"""The HTTP process: OpenAI's API and the web pages, in front of an engine host. It imports no torch."""
