"""Reference implementation of every function in plain torch; the others are tested against it."""
