"""Command line: flags, commands, the terminal chat and benchmarks."""
