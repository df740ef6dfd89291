"""GGUF files: config, tokenizer and weights of a model in one file, or in several split files."""
