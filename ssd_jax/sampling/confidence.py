"""Classes of a draft's confidence in the tokens that it proposes."""

from __future__ import annotations

EDGES = (0.1, 0.25, 0.45, 0.65, 0.8, 0.9, 0.97)
"""Probabilities that separate the classes of confidence 0 to 7."""

UNKNOWN = -1
"""Class of a token that the draft did not make, or reported nothing about."""
