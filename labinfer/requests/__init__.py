"""Requests: prompts and HTTP bodies in, outputs and answers out."""
