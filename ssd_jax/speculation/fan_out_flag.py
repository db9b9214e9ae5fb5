"""The fan-out that a user asks for: a policy's name, or lists of counts. Pure host code."""

from __future__ import annotations

from collections.abc import Callable

from ssd_jax.errors import InputError
from ssd_jax.speculation.confidence import ConfidenceFanOut
from ssd_jax.speculation.fan_out import (
    LEAST_BUDGET,
    FanOut,
    GeometricFanOut,
    ListedFanOut,
    UniformFanOut,
)
from ssd_jax.speculation.measured import MeasuredFanOut

_POLICIES: dict[str, Callable[[], FanOut]] = {
    "uniform": UniformFanOut,
    "geometric": GeometricFanOut,
    "measured": MeasuredFanOut,
    "confidence": ConfidenceFanOut,
}


def parse(text: str, k: int, budget: int) -> FanOut:
    """The policy that a user asks for.

    Args:
      text: uniform, geometric, measured, confidence, or K + 1 integers for k = 0..K such as
        4,3,3,2,4; a second list after a slash holds where the tokens being verified were no
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
    if text in _POLICIES:
        return _POLICIES[text]()
    example = ",".join(map(str, UniformFanOut().counts(k, budget, "hit")))
    if "," not in text:
        raise InputError(
            f"fan_out = {text!r} is unknown; give {', '.join(_POLICIES)}, or {k + 1} integers "
            f"that sum to the budget, such as {example}"
        )
    hit, slash, miss = text.partition("/")
    prepared = _listed(text, hit, k, budget, example)
    return ListedFanOut(prepared, _listed(text, miss, k, budget, example) if slash else prepared)


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
