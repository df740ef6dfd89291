"""Functions for CPUs, in C++."""
