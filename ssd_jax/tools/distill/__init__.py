"""Distilling a draft for a target: prompts, the target's own text, training, evaluation."""
