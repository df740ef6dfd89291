"""Model families: a short file per architecture, built of the shared layers. ``registry.py`` finds a family by its class name."""
