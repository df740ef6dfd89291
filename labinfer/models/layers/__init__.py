"""The parts models are built of. A layer receives its communicator, functions and dtype in its constructor."""
