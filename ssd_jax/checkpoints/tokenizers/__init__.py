"""Tokenizers of checkpoints: text to token ids and back."""
