"""Layers, of which the model families are built. A layer receives its communicator, functions and dtype in its constructor."""
