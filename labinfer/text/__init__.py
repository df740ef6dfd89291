"""Text: tokenizer, chat template, detokenization, tool calls, structured output. Only rank 0 and the gateway use it."""
