"""A fan-out policy of a program: what it answers is checked. Pure host code."""

from __future__ import annotations

from numbers import Integral

from typing_extensions import override

from ssd_jax.errors import InputError
from ssd_jax.speculation.fan_out import After, Classes, Counts, FanOut, VerificationStats


class CheckedFanOut(FanOut):
    """A policy whose counts are checked, and which gets confidence only if it reads it.

    Args:
      policy: decides.
      name: of the policy, for errors.
    """

    def __init__(self, policy: FanOut, name: str) -> None:
        self.reads_confidence = policy.reads_confidence  # pyright: ignore[reportAttributeAccessIssue]
        self._policy, self._name = policy, name

    @override
    def counts(self, length: int, budget: int, after: After, confidence: Classes = ()) -> Counts:
        """The policy's counts.

        Raises:
          InputError: they are not L + 1 numbers that sum to the budget, the last one at least 1.
        """
        known = confidence[:length] if self.reads_confidence else ()
        counts = self._policy.counts(length, budget, after, known)
        integers = isinstance(counts, tuple | list) and all(isinstance(n, Integral) for n in counts)
        if not integers or len(counts) != length + 1 or min(counts) < 0 or counts[-1] < 1:
            wrong = f"give {length + 1} numbers, none negative and the last one at least 1"
        elif sum(counts) != budget:
            wrong = f"their sum is {sum(counts)}, and must be budget = {budget}"
        else:
            return tuple(map(int, counts))
        raise InputError(f"fan_out {self._name}: counts({length}, {budget}) = {counts!r}; {wrong}")

    @override
    def observe(self, verified: VerificationStats) -> None:
        known = verified if self.reads_confidence else verified._replace(confidence=())
        self._policy.observe(known)
