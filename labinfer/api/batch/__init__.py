"""Batch jobs over JSONL files."""
