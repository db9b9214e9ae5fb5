"""Log-probabilities of the tokens of prompts, from the hidden states of their prefills."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from ssd_jax.devices.programs import device
from ssd_jax.devices.target import logprob_programs
from ssd_jax.devices.target.programs import Programs
from ssd_jax.devices.target.results import DeviceLogprobs
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling.logprobs import Logprobs

Chunks = list[tuple[int, jax.Array]]
"""Of a prefill, the number of tokens of each chunk, and their hidden states [1, width, H]."""


class PromptScores:
    """Scores the prompt of the last prefill, if its request asks for that."""

    def __init__(self, programs: Programs, parameters: Parameters) -> None:
        self._programs, self._parameters = programs, parameters
        self._scored = np.zeros(programs.slots, bool)
        self._chunks: Chunks = []

    def open(self, opening: SlotOpening) -> None:
        """Notes whether a slot's prompt gets log-probabilities."""
        self._scored[opening.slot] = opening.params.prompt_logprobs is not None

    def prefilled(self, slot: int, chunks: Chunks) -> None:
        """Keeps the states of a slot's prefill, if they are needed."""
        self._chunks = chunks if self._scored[slot] else []

    def score(self, slot: int, tokens: Sequence[int]) -> DeviceLogprobs:
        """The log-probabilities of the tokens that follow each token of the last prefill."""
        parts: list[tuple[int, Logprobs]] = []
        begin = 0
        for count, hidden in self._chunks:
            width = hidden.shape[1]
            rows = logprob_programs.rows(width)
            for first in range(0, count, rows):
                scored = tokens[begin + first : begin + min(first + rows, count)]
                if scored:
                    padded = np.zeros((1, rows), np.int32)
                    padded[0, : len(scored)] = scored
                    origin = np.array([slot, first], np.int32)
                    program = self._programs["prompt_logprobs", width]
                    (logprobs,) = device.run(program, self._parameters, hidden, padded, origin)
                    parts.append((len(scored), logprobs))
            begin += count
        self._chunks = []
        return DeviceLogprobs(parts)
