"""A scripted target and a toy text decoder: the engine without JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import IDLE


class Ready:
    """An outcome that is already there."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = np.asarray(values, np.int32)

    def read(self) -> np.ndarray:
        return self._values


class FakeTarget:
    """Continues each prompt by `script(prompt_ids, position)`; keeps what a device would hold.

    Every position a token is written to is recorded, so a read of a position that was not written,
    or was overwritten by another request, fails at once.
    """

    def __init__(
        self,
        script: Callable[[Sequence[int], int], int],
        *,
        slots: int = 2,
        context: int = 64,
        max_chunk: int = 4,
    ) -> None:
        self.slots, self.context, self.max_chunk = slots, context, max_chunk
        self._script = script
        self._pages = [[-1] * context for _ in range(slots)]
        self._prompts: list[list[int]] = [[] for _ in range(slots)]
        self.opened: list[tuple[int, SamplingParams, int, list[int], int]] = []
        self.calls: list[str] = []

    def open(self, slot, params, index, banned, ban_before) -> None:
        self._prompts[slot] = []
        self.opened.append((slot, params, index, list(banned), ban_before))

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        assert 0 < len(tokens) <= self.max_chunk
        assert offset == len(self._prompts[slot])
        self._prompts[slot] += tokens
        self._pages[slot][offset : offset + len(tokens)] = tokens
        self.calls.append("prefill")

    def prefill_last(self, slot: int, tokens: Sequence[int], offset: int) -> Ready:
        self.prefill(slot, tokens, offset)
        prompt = self._prompts[slot]
        return Ready([self._script(prompt, len(prompt))])

    def forward(self, tokens: np.ndarray, lengths: np.ndarray) -> Ready:
        assert tokens.shape == lengths.shape == (self.slots,)
        self.calls.append("forward")
        drawn = np.zeros(self.slots, np.int32)
        for slot, length in enumerate(lengths):
            if length == IDLE:
                continue
            prompt = self._prompts[slot]
            self._pages[slot][length] = tokens[slot]
            expected = prompt + [self._script(prompt, at) for at in range(len(prompt), length + 1)]
            assert self._pages[slot][: length + 1] == expected
            drawn[slot] = self._script(prompt, length + 1)
        return Ready(drawn)


class Letters:
    """Token id -> a character; ids below 32 are special and invisible."""

    def push(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token >= 32)

    def flush(self) -> str:
        return ""


class Clock:
    """Advances one second a look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now
