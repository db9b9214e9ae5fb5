"""The findings of a comparison: a verdict on every pair that is not identical."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from ssd_jax.compare.pairs import Pair
from ssd_jax.compare.verdict import Verdict
from ssd_jax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Where two runs part, and why.

    Attributes:
      verdict: None where a run has no answer.
      margin: between the target's scores of the two tokens, in logits; infinite if one is banned,
        None if it is not known.
      texts: of the two tokens; None where there is no token or no tokenizer.
    """

    pair: Pair
    verdict: Verdict | None
    margin: float | None = None
    texts: tuple[str | None, str | None] = (None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs compared.

    Attributes:
      names: of A and B.
      pairs: of all prompts.
      findings: of the pairs that are not identical, in prompt order.
      limit: margins below it are explained by rounding; None without a model.
      bitwise: whether the runs promised bitwise exactness.
    """

    names: tuple[str, str]
    pairs: tuple[Pair, ...]
    findings: tuple[Finding, ...]
    limit: float | None = None
    bitwise: bool = False

    @property
    def compared(self) -> int:
        """Prompts that both runs answered."""
        return sum(pair.compared for pair in self.pairs)

    @property
    def identical(self) -> int:
        """Prompts that both answered with the same ids."""
        return sum(pair.kind == "identical" for pair in self.pairs)

    @property
    def positions(self) -> list[int]:
        """Where texts part, ascending."""
        return sorted(pair.position for pair in self.pairs if pair.position is not None)

    @property
    def median_position(self) -> float | None:
        """The median of `positions`."""
        return statistics.median(self.positions) if self.positions else None

    @property
    def verdicts(self) -> Counter[str]:
        """How many findings have each verdict."""
        return Counter(finding.verdict for finding in self.findings if finding.verdict)

    @property
    def one_sided(self) -> int:
        """Prompts that only one run answered."""
        return sum(
            not pair.compared
            and any(output is not None and output.error is None for output in (pair.a, pair.b))
            for pair in self.pairs
        )

    @property
    def exit_status(self) -> int:
        """0 if every difference is lawful, 2 if prompts are missing, 1 if one is not or may not."""
        if self.verdicts["law"]:
            return 1
        if self.one_sided:
            return InputError.exit_status
        return 1 if self.verdicts["unknown"] else 0


Judge = Callable[[Pair], Finding]


def compare(
    names: tuple[str, str],
    pairs: Sequence[Pair],
    judged: Judge,
    *,
    limit: float | None = None,
    bitwise: bool = False,
) -> Comparison:
    """Judges every pair that is not identical; `judged` is asked about forks and early ends."""
    findings = [
        judged(pair) if pair.compared else Finding(pair=pair, verdict=None)
        for pair in pairs
        if pair.kind != "identical"
    ]
    return Comparison(
        names=names, pairs=tuple(pairs), findings=tuple(findings), limit=limit, bitwise=bitwise
    )
