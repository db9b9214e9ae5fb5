"""Sampling settings of the slots, kept on the host and copied to the device when they change."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ssd_jax.models.sharding import put
from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED_IDS,
    MAX_STOP_IDS,
    SamplingParams,
)
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.variants import Parts

_COMMON_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} & {*Sampling._fields}


class SamplingRows:
    """`Sampling` of `rows` slots over `vocab` embedding rows; slots start greedy.

    Args:
      where: devices of the settings; None is the default device.
    """

    def __init__(self, rows: int, vocab: int, sharding: Sharding | None = None) -> None:
        self._vocab, self._sharding = vocab, sharding
        arrays: dict[str, Any] = {
            "temperature": np.zeros(rows, np.float32),
            "top_k": np.zeros(rows, np.int32),
            "top_p": np.ones(rows, np.float32),
            "min_p": np.zeros(rows, np.float32),
            "repetition_penalty": np.ones(rows, np.float32),
            "frequency_penalty": np.zeros(rows, np.float32),
            "presence_penalty": np.zeros(rows, np.float32),
            "bias_ids": np.full((rows, MAX_BIASED_IDS), vocab, np.int32),
            "bias": np.zeros((rows, MAX_BIASED_IDS), np.float32),
            "seed": np.zeros((rows, 2), np.uint32),
            "request": np.zeros(rows, np.uint32),
            "banned": np.full((rows, MAX_STOP_IDS), -1, np.int32),
            "ban_before": np.zeros(rows, np.int32),
            "bad_word_ids": np.full((rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32),
        }
        self._host: Any = Sampling(**arrays)
        self._device: Sampling | None = None
        self._bad_word_ids: jax.Array | None = None  # on the device: most requests have none

    def set(self, opening: SlotOpening, temperature: float | None = None) -> None:
        """Sets one slot.

        Args:
          temperature: replaces a sampled request's own.
        """
        row, params, host = opening.slot, opening.params, self._host
        for name in _COMMON_FIELDS - {"seed"}:
            getattr(host, name)[row] = getattr(params, name)
        if temperature is not None and params.temperature > 0:
            host.temperature[row] = temperature
        host.bias_ids[row] = self._vocab
        for place, (token, bias) in enumerate(params.logit_bias):
            host.bias_ids[row, place] = token
            host.bias[row, place] = bias
        host.seed[row] = (params.seed_of_request & 0xFFFFFFFF, params.seed_of_request >> 32)
        host.request[row] = opening.index
        host.banned[row] = -1
        host.banned[row, : len(opening.banned)] = opening.banned
        host.ban_before[row] = opening.ban_before
        words = host.bad_word_ids[row]
        if opening.bad_word_ids or (words >= 0).any():
            words[:] = -1
            for place, ids in enumerate(opening.bad_word_ids):
                words[place, -len(ids) :] = ids
            self._bad_word_ids = None
        self._device = None

    def on_device(self) -> Sampling:
        """All slots, copied only after a change."""
        device = self._device
        if device is None:
            # The host arrays are changed in place later, and a CPU device may share their memory.
            if self._bad_word_ids is None:
                self._bad_word_ids = put(self._host.bad_word_ids.copy(), self._sharding)
            settings = jax.tree.map(np.array, self._host._replace(bad_word_ids=None))
            device = put(settings, self._sharding)._replace(bad_word_ids=self._bad_word_ids)
            self._device = device
        return device

    def row(self, row: int) -> Sampling:
        """One slot as a batch of one."""
        return jax.tree.map(lambda array: array[row : row + 1].copy(), self._host)

    def needed(self, start: np.ndarray) -> Parts:
        """Parts of sampling that the slots need.

        Args:
          start: [rows] position before that of each slot's first token; slots with a negative one
            are idle and need nothing.
        """
        host, live = self._host, start >= 0
        hot = live & (host.temperature > 0)
        truncated = (host.top_k > 0) | (host.top_p < 1) | (host.min_p > 0)
        banned = (host.ban_before > start + 1) & (host.banned >= 0).any(axis=1)
        penalised = host.repetition_penalty != 1
        penalised |= (host.frequency_penalty != 0) | (host.presence_penalty != 0)
        biased = (host.bias_ids < self._vocab).any(axis=1)
        bad_worded = (host.bad_word_ids[..., -1] >= 0).any(axis=1)
        return Parts(
            sampled=bool(hot.any()),
            truncated=bool((hot & truncated).any()),
            adjusted=bool((live & (banned | penalised | biased | bad_worded)).any()),
        )

    def structs(self) -> Sampling:
        """Shapes and dtypes, for compilation."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._host)
