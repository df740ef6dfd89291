"""GGUF families: one file for each group of related architectures, with its ``FAMILIES`` by ``general.architecture``."""
