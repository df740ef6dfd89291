"""Start of a model on the ranks of a group: layout, communicators, weights, startup measurements."""
