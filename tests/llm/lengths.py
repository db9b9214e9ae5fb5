"""A target that compares how many tokens a draft says it proposes with what it then proposes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ssd_jax.engine.engine import Engine


class Comparing:
    """Stands before an engine's target.

    Attributes:
      proposed: how many tokens of how many verifications were compared, by L.
    """

    def __init__(self, engine: Engine) -> None:
        self._target, engine._target = engine._target, self
        self.proposed: dict[int, int] = {}
        self._told: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, pending: Any, lengths: Any, drafted: Any = None) -> Any:
        self._told = drafted
        return self._target.forward(pending, lengths, drafted)

    def accept(self, logits: Any, proposal: Any = None) -> Any:
        assert (proposal is None) == (self._told is None)
        if proposal is not None:
            told = np.asarray(self._told.lengths)
            np.testing.assert_array_equal(np.asarray(proposal.length), told)
            for length in told.tolist():
                self.proposed[length] = self.proposed.get(length, 0) + 1
        return self._target.accept(logits, proposal)
