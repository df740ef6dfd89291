"""Model directories as Hugging Face has them: their configs, tokenizers' end tokens, pooling and output heads."""
