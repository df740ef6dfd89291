"""C++ implementations of functions, for CPUs."""
