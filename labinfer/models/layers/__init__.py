"""The layers that model families are built from. A layer receives its communicator, functions and dtype in its constructor."""
