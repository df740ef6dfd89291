"""Terminal: chat with a model from a terminal. Does not import torch, so that a chat with a server starts at once."""
