"""Talking to a model from a terminal; knows no torch, so that a chat with a server begins at once."""
