"""The registry of parts that are chosen by name, and plugins, which add to it."""
