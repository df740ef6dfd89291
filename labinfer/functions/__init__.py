"""The operations that models are made of, each an interface with one or more implementations."""
