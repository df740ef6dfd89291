"""Communicators: transfer of tensors and bytes between ranks, independent of their meaning."""
