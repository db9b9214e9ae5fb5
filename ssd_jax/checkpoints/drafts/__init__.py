"""Draft checkpoints: a draft's own tensors, the rest of its target, and those that are shipped."""
