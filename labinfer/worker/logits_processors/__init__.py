"""Logits processors that ship with LABInfer. ``processor.py`` has their contract; ``base/kinds.py`` lists them."""
