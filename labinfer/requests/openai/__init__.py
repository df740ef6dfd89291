"""OpenAI's API: request and response schemas, and errors."""
