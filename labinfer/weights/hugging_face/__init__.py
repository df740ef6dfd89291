"""Hugging Face model directories: configs, end tokens of tokenizers, pooling and LM heads."""
