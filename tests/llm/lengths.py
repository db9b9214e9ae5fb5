"""A target that compares how many tokens a draft says it proposes with what it then proposes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ssd_jax.engine.engine import Engine
from ssd_jax.roles.records import Drafted
from tests.fakes.instrument import instrument


class Comparing:
    """Compares what an engine's target is given.

    Attributes:
      proposed: how many verifications were compared, by L.
    """

    def __init__(self, engine: Engine) -> None:
        self.proposed: Counter[int] = Counter()
        self._drafted: Drafted | None = None
        instrument(engine._target, note={"forward": self._forward, "accept": self._accept})

    def _forward(self, _pending: Any, _lengths: Any, drafted: Drafted | None = None) -> None:
        self._drafted = drafted

    def _accept(self, _logits: Any, proposal: Any = None) -> None:
        assert (proposal is None) == (self._drafted is None)
        if self._drafted is not None:
            lengths = np.asarray(self._drafted.lengths)
            np.testing.assert_array_equal(np.asarray(proposal.length), lengths)
            self.proposed.update(lengths.tolist())
