"""SPMD environment of this process: launcher variables, topology, and resources of the machine."""
