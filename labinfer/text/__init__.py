"""Text in, text out: tokenizer, chat template, incremental detokenisation. Only rank 0 loads these."""
