"""Compilation and loading of C++ libraries on the machine they run on, independent of the libraries' functions."""
