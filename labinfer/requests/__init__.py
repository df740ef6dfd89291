"""Requests: converts prompts, HTTP bodies and JSONL lines to engine requests, and engine outputs to answers."""
