"""Python API: LLM, and batch jobs over JSONL files."""
