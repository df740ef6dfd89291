"""Logits processors that ship with LABInfer. ``processor.py`` says what one must do; ``base/kinds.py`` lists these."""
