"""What a round is given, and what is recorded of it."""
