"""What is known before programs run: models and types, memory, exactness, fallbacks."""
