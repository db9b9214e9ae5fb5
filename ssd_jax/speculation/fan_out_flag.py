"""The fan-out that a user asks for: a policy's name, or lists of counts. Pure host code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ssd_jax.errors import InputError
from ssd_jax.speculation.fan_out import (
    LEAST_BUDGET,
    ConfidenceFanOut,
    Counts,
    FanOut,
    GeometricFanOut,
    ListedFanOut,
    MeasuredFanOut,
    UniformFanOut,
)


class NamedPolicy(NamedTuple):
    """A policy that has a name.

    Attributes:
      make: makes the policy of a sequence.
      summary: what the help says of it.
    """

    make: Callable[[], FanOut]
    summary: str = ""


POLICIES: Mapping[str, NamedPolicy] = {
    "uniform": NamedPolicy(UniformFanOut),
    "geometric": NamedPolicy(GeometricFanOut, "learns one acceptance rate"),
    "measured": NamedPolicy(MeasuredFanOut, "one per position, and how fast branches cut misses"),
    "confidence": NamedPolicy(ConfidenceFanOut, "from the draft's token probabilities"),
}


def parse(text: str, k: int, budget: int) -> FanOut:
    """The policy that a user asks for.

    Args:
      text: a name of `POLICIES`, or K + 1 integers for k = 0..K such as
        4,3,3,2,4; a second list after a slash applies where the tokens being verified were no
        prepared branch.
      k: K, at least 1.
      budget: M; each list sums to it.

    Raises:
      InputError: an unknown word, an impossible list or budget.
    """
    if budget < LEAST_BUDGET:
        raise InputError(
            f"budget = {budget} is too small for fan_out = {text!r}; give at least {LEAST_BUDGET}"
        )
    if text in POLICIES:
        return POLICIES[text].make()
    example = ",".join(map(str, UniformFanOut().counts(k, budget, "hit")))
    if "," not in text:
        raise InputError(
            f"fan_out = {text!r} is unknown; give {', '.join(POLICIES)}, or {k + 1} integers "
            f"that sum to the budget, such as {example}"
        )
    parts = [_listed(text, part, k, budget, example) for part in text.split("/", 1)]
    return ListedFanOut(parts[0], parts[-1])


def _listed(text: str, part: str, k: int, budget: int, example: str) -> Counts:
    """Parses and checks one list of `fan_out = text`."""
    remedy, counts = f"give a list such as {example}", []
    for word in part.split(","):
        try:
            counts.append(int(word))
        except ValueError:
            raise InputError(f"fan_out = {text!r}: {word!r} is not an integer; {remedy}") from None
    wrong = None
    if len(counts) != k + 1:
        wrong = f"{part!r} has {len(counts)} entries, and k = 0..{k} needs {k + 1}"
    elif min(counts) < 0:
        wrong = f"{min(counts)} is negative"
    elif counts[-1] < 1:
        wrong = f"the entry of k = {k} is {counts[-1]} and must be at least 1"
    elif sum(counts) != budget:
        wrong = f"{part!r} sums to {sum(counts)}, and budget = {budget}"
        remedy = f"give `budget={sum(counts)}`, or a list such as {example}"
    if wrong is not None:
        raise InputError(f"fan_out = {text!r}: {wrong}; {remedy}")
    return tuple(counts)
