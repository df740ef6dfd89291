"""The gateway: OpenAI's API over HTTP, in front of an engine."""
