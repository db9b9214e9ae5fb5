"""What the engine asks of a target: pure host types, so that tests can give it fakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ssd_jax.runtime.request import SamplingParams

IDLE = -1
"""Length of a slot that a batched forward must leave alone."""


class Pending(Protocol):
    """The outcome of a dispatched program."""

    def read(self) -> np.ndarray:
        """Waits for it: the bonus token of each row, int32 [B]."""
        ...


class Target(Protocol):
    """The target role: slots, and programs that are dispatched without waiting.

    Attributes:
      slots: rows of a batched forward.
      context: most positions a sequence may have, prompt and output together.
      max_chunk: most prompt tokens one prefill takes.
    """

    slots: int
    context: int
    max_chunk: int

    def open(
        self, slot: int, params: SamplingParams, index: int, banned: Sequence[int], ban_before: int
    ) -> None:
        """Sets a slot's sampling; `banned` ids are impossible at positions below `ban_before`."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """Writes the keys and values of prompt tokens that others will follow."""
        ...

    def prefill_last(self, slot: int, tokens: Sequence[int], offset: int) -> Pending:
        """Prefills the prompt's last tokens and draws the first token, [1]."""
        ...

    def forward(self, tokens: np.ndarray, lengths: np.ndarray) -> Pending:
        """Runs each row's pending token [B] at position lengths [B] and draws the next, [B]."""
        ...
