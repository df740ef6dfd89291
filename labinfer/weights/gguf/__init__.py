"""Models in GGUF files: config, tokenizer and weights in one file, or in several that are split."""
