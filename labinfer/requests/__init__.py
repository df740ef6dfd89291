"""Requests: converts prompts and HTTP bodies to engine requests, and engine outputs to answers."""
