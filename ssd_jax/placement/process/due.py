"""How long a worker may hold back what it has speculated so far."""

from __future__ import annotations

import time
from collections import deque

_LATELY, _EARLIER = 16, 0.8  # verifications; share of the shortest that is surely left


class Due:
    """Estimates when the outcome of the verification beside an expansion may be ready."""

    def __init__(self) -> None:
        self._asked: float | None = None
        self._lately: deque[float] = deque(maxlen=_LATELY)

    def expected(self) -> float:
        """Seconds from now, when the expansion is requested, to the earliest outcome."""
        self._asked = time.perf_counter()
        return _EARLIER * min(self._lately) if len(self._lately) == _LATELY else 0.0

    def outcome(self) -> None:
        """Records that the outcome is ready; may be called more than once."""
        if self._asked is not None:
            self._lately.append(time.perf_counter() - self._asked)
        self._asked = None
