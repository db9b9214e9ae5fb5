"""Paces that wait for a draft as a test wants it, whatever the clock says."""

from __future__ import annotations

import numpy as np

from ssd_jax.speculation.pace import Pace


class Patient(Pace):
    """Waits for all there is to come."""

    def worth(self, work, tokens, usual, *, underway=0.0):
        return max((len(row) - 1 for row in tokens), default=0)


class Hasty(Pace):
    """Waits for nothing."""

    def worth(self, work, tokens, usual, *, underway=0.0):
        return 0


class Moody(Pace):
    """Waits for any number of forwards, each as likely."""

    def __init__(self, seed=0):
        super().__init__()
        self._rng = np.random.default_rng(seed)

    def worth(self, work, tokens, usual, *, underway=0.0):
        return int(self._rng.integers(max((len(row) for row in tokens), default=1)))
