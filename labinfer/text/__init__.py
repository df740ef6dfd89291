"""Text: tokenizer, chat template, detokenization, tool calls, structured output. Used only by rank 0 and the gateway."""
