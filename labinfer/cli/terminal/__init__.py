"""Terminal: chat with a model from a terminal; no torch, so that a chat with a server starts at once."""
