"""The frames between the gateway and the engine host."""
