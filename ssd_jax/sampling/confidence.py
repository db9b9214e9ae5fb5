"""Classes of a draft's confidence in the tokens that it proposes.

The probability q of a token says most where nothing but the models decides: in greedy rows, and
where draft and target draw with noises of their own. Where they share the noise of a position, the
gap between the two best of log q + noise also says how far the target's scores may be from the
draft's before it takes another token; the class is then that of log(q / (1 - q)) + gap.
"""

from __future__ import annotations

EDGES = (0.1, 0.25, 0.45, 0.65, 0.8, 0.9, 0.97)
"""Probabilities that separate the classes of confidence 0 to 7."""

GAP_EDGES = (0.25, 0.5, 1.0, 1.5, 2.25, 3.25, 5.0)
"""Gaps between the two best scores that separate the classes of a node's continuations."""

SHARED_EDGES = (-2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 7.0)
"""Values of log(q / (1 - q)) + gap that separate the classes where noise is shared."""

UNKNOWN = -1
"""Class of a token that the draft did not make, or reported nothing about."""
