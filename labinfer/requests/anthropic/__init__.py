"""Objects of Anthropic's Messages API."""
