"""Tensors of any format: by name, in layouts and groups, and how they get onto devices."""
