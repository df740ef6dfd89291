"""Moving bytes between ranks. Nothing here knows what the bytes mean."""
