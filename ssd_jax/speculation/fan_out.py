"""Fan-out: how many bonus tokens are prepared for each number k of accepted tokens.

While L proposed tokens are being verified, the draft may start M branches, one for each outcome
(k, t*) that it prepares for. A policy divides M into F_0..F_L. F_L is at least 1: that slot also
carries the last proposed token. Pure host code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

from ssd_jax.errors import InputError, NotBuiltYetError

After = Literal["hit", "miss"]
"""Where the tokens being verified came from: a prepared branch, or a backup or nothing."""

LEAST_BUDGET = 2
"""Branches a sequence needs: one for k = L, and one for anything else."""

_LATER = ("measured", "confidence")
_FIRST_GUESS, _WEIGHT = 0.8, 8.0  # the acceptance rate before anything is known, worth 8 tokens
_LIMITS = (0.01, 0.99)


class FanOut(Protocol):
    """A policy. It may look at anything but noise and the tokens that a branch will propose."""

    def counts(self, length: int, budget: int, after: After) -> tuple[int, ...]:
        """F_0..F_L: they sum to `budget`, F_L >= 1, the others may be 0.

        Args:
          length: L in 0..K, proposed tokens that are being verified.
          budget: M, at least 1.
          after: where those tokens came from.
        """
        ...

    def observe(self, accepted: int, length: int, after: After) -> None:
        """Learns from a verification: `accepted` of `length` proposed tokens were kept."""
        ...


@dataclasses.dataclass(frozen=True)
class Uniform:
    """The same for every k; what does not divide goes to the smallest k."""

    def counts(self, length: int, budget: int, after: After) -> tuple[int, ...]:
        """See `FanOut.counts`."""
        return _counts([1.0] * (length + 1), budget)

    def observe(self, accepted: int, length: int, after: After) -> None:
        """See `FanOut.observe`; there is nothing to learn."""


@dataclasses.dataclass(frozen=True)
class Listed:
    """What the user says. With L < K, F_k is kept for k < L and the rest goes to k = L.

    With a budget other than the lists' sum, in proportion to them.

    Attributes:
      hit, miss: K + 1 counts each, the last one at least 1.
    """

    hit: tuple[int, ...]
    miss: tuple[int, ...]

    def counts(self, length: int, budget: int, after: After) -> tuple[int, ...]:
        """See `FanOut.counts`."""
        listed = self.hit if after == "hit" else self.miss
        return _counts([*listed[:length], sum(listed[length:])], budget)

    def observe(self, accepted: int, length: int, after: After) -> None:
        """See `FanOut.observe`; there is nothing to learn."""


class Geometric:
    """F_k proportional to P(k)^(1/(1+r)), where each token is accepted with the same probability a.

    With P(k) = a^k (1-a) for k < L and P(L) = a^L this is Theorem 12 of the paper:
    F_k = F_0 a^(k/(1+r)) and F_L = F_0 a^(L/(1+r)) (1-a)^(-1/(1+r)). It is the least sum of
    P(k) F_k^-r, the chance of a miss under the paper's power law. a is learned as verifications
    come in, apart for tokens that the draft prepared and for those that it did not.

    Args:
      acceptance: a before anything was observed.
      r: exponent of the power law.
    """

    def __init__(self, *, acceptance: float = _FIRST_GUESS, r: float = 1.0) -> None:
        self._r = r
        self._accepted: dict[After, float] = dict.fromkeys(("hit", "miss"), acceptance * _WEIGHT)
        self._judged: dict[After, float] = dict.fromkeys(("hit", "miss"), _WEIGHT)

    def acceptance(self, after: After) -> float:
        """The estimate of a, within [.01, .99]."""
        low, high = _LIMITS
        return min(max(self._accepted[after] / self._judged[after], low), high)

    def counts(self, length: int, budget: int, after: After) -> tuple[int, ...]:
        """See `FanOut.counts`."""
        a = self.acceptance(after)
        odds = [a**k * (1 - a) for k in range(length)] + [a**length]
        return _counts([p ** (1 / (1 + self._r)) for p in odds], budget)

    def observe(self, accepted: int, length: int, after: After) -> None:
        """See `FanOut.observe`; tokens after the first rejected one were not judged."""
        self._accepted[after] += accepted
        self._judged[after] += min(accepted + 1, length)


def share(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Divides `total` in proportion to the weights, by largest remainder.

    Of equal remainders the first wins, so larger weights never get less.

    Args:
      weights: none negative, not all 0.
    """
    scale = total / sum(weights)
    quotas = [weight * scale for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def parse(text: str, k: int, budget: int) -> FanOut:
    """The policy that a user asks for.

    Args:
      text: uniform, geometric, or K + 1 integers for k = 0..K such as 4,3,3,2,4; a second list
        after a slash holds where the tokens being verified were no prepared branch.
      k: K, at least 1.
      budget: M; each list sums to it.

    Raises:
      InputError: an unknown word, an impossible list or budget.
      NotBuiltYetError: a policy that has not landed yet.
    """
    if budget < LEAST_BUDGET:
        raise InputError(
            f"budget = {budget} is too small for fan_out = {text!r}; give at least {LEAST_BUDGET}"
        )
    if text == "uniform":
        return Uniform()
    if text == "geometric":
        return Geometric()
    if text in _LATER:
        raise NotBuiltYetError(f"fan_out = {text!r}", "uniform, geometric or a list")
    example = ",".join(map(str, Uniform().counts(k, budget, "hit")))
    if "," not in text:
        raise InputError(
            f"fan_out = {text!r} is unknown; give uniform, geometric, or {k + 1} integers that "
            f"sum to the budget, such as {example}"
        )
    hit, slash, miss = text.partition("/")
    prepared = _listed(text, hit, k, budget, example)
    return Listed(prepared, _listed(text, miss, k, budget, example) if slash else prepared)


def _listed(text: str, part: str, k: int, budget: int, example: str) -> tuple[int, ...]:
    """One list of `fan_out = text`, checked."""

    def refuse(what: str) -> InputError:
        return InputError(f"fan_out = {text!r}: {what}; give a list such as {example}")

    counts = []
    for word in part.split(","):
        try:
            counts.append(int(word))
        except ValueError:
            raise refuse(f"{word!r} is not an integer") from None
    if len(counts) != k + 1:
        raise refuse(f"{part!r} has {len(counts)} entries, and k = 0..{k} needs {k + 1}")
    if min(counts) < 0:
        raise refuse(f"{min(counts)} is negative")
    if counts[-1] < 1:
        raise refuse(f"the entry of k = {k} is {counts[-1]} and must be at least 1")
    if sum(counts) != budget:
        raise InputError(
            f"fan_out = {text!r}: {part!r} sums to {sum(counts)}, and budget = {budget}; give "
            f"--budget={sum(counts)}, or a list such as {example}"
        )
    return tuple(counts)


def _counts(weights: Sequence[float], budget: int) -> tuple[int, ...]:
    """`share`, with at least 1 for the last."""
    counts = share(weights, budget)
    return counts if counts[-1] else (*share(weights[:-1], budget - 1), 1)
