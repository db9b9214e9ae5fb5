"""Two runs' outputs side by side, prompt by prompt."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

from ssd_jax.bench.run import first_difference
from ssd_jax.compare.outputs import Output
from ssd_jax.errors import InputError

Kind = Literal["identical", "fork", "end", "refused", "missing"]
"""identical: the same ids. fork: both have a token where they part. end: one text goes on where
the other ended. refused, missing: one run or both refused the prompt or failed amid it, or one has
no line for it.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """What two runs said to one prompt; None where a run has no line for it."""

    prompt_index: int
    a: Output | None
    b: Output | None

    @functools.cached_property
    def position(self) -> int | None:
        """Index from 0 of the first output token that differs; one missing counts as different."""
        if not self.compared:
            return None
        assert self.a is not None
        assert self.b is not None
        return first_difference(self.a.token_ids, self.b.token_ids)

    @property
    def kind(self) -> Kind:
        """See `Kind`."""
        if self.a is None or self.b is None:
            return "missing"
        if not self.compared:
            return "refused"
        if self.position is None:
            return "identical"
        return "end" if None in self.tokens else "fork"

    @property
    def compared(self) -> bool:
        """Whether both runs answered."""
        return all(output is not None and output.error is None for output in (self.a, self.b))

    @property
    def tokens(self) -> tuple[int | None, int | None]:
        """The tokens of A and B where they part; None for a text that has ended there."""
        return self._token(self.a), self._token(self.b)

    @property
    def common(self) -> tuple[int, ...]:
        """The output ids before the first difference."""
        return () if self.a is None else self.a.token_ids[: self.position]

    def _token(self, output: Output | None) -> int | None:
        if output is None or self.position is None or self.position >= len(output.token_ids):
            return None
        return output.token_ids[self.position]


def pair_up(a: Mapping[int, Output], b: Mapping[int, Output]) -> list[Pair]:
    """Pairs of all prompts that either run has, in prompt order.

    Raises:
      InputError: there is no prompt that both answered.
    """
    pairs = [Pair(prompt_index=index, a=a.get(index), b=b.get(index)) for index in sorted({*a, *b})]
    if not any(pair.compared for pair in pairs):
        raise InputError(
            "no prompt has an answer in both; give two runs of the same prompts "
            f"(prompt_index {_span(a)} against {_span(b)})"
        )
    return pairs


def _span(outputs: Mapping[int, Output]) -> str:
    return f"{min(outputs)} to {max(outputs)}" if outputs else "none"
