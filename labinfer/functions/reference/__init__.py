"""What each function means, in plain torch. Other implementations are tested against these."""
