"""The parts models are built of. A layer receives its communicator, functions and number type in its constructor."""
