"""Choices by measured costs: the mode, K and M of `auto`."""
