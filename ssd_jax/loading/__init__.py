"""From checkpoints to loaded models: memory, pages, weights beside compiled programs."""
