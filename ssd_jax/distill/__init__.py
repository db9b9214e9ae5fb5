"""Making drafts: prompts, the target's own text, training, evaluation."""
