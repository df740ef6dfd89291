"""Anthropic's Messages API: request and response schemas."""
