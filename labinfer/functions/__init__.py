"""The operations a model is made of, each behind one interface with one or more implementations."""
