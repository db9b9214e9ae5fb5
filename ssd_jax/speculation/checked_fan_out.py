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
        found = self._policy.counts(length, budget, after, known)
        whole = isinstance(found, tuple | list) and all(isinstance(n, Integral) for n in found)
        if not whole or len(found) != length + 1 or min(found) < 0 or found[-1] < 1:
            wrong = f"give {length + 1} numbers, none negative and the last one at least 1"
        elif sum(found) != budget:
            wrong = f"their sum is {sum(found)}, and must be budget = {budget}"
        else:
            return tuple(map(int, found))
        raise InputError(f"fan_out {self._name}: counts({length}, {budget}) = {found!r}; {wrong}")

    @override
    def observe(self, verified: VerificationStats) -> None:
        known = verified if self.reads_confidence else verified._replace(confidence=())
        self._policy.observe(known)
