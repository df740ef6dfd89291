"""Reference implementation of every function in plain torch; all other implementations are tested against it."""
