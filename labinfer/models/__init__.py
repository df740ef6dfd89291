"""One short file per architecture, over the shared layers; ``registry.py`` finds them by name."""
