"""A model run over given texts: the logits behind each of their tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.devices.passes import ProgramSpec
from ssd_jax.kernels import kv_pages
from ssd_jax.models.functional import FunctionalModel, Parameters


class TeacherForced:
    """One compiled program that runs a text in chunks, from an empty cache.

    Args:
      model: static description.
      parameters: its arrays.
      longest: tokens of the longest text.

    Attributes:
      width: tokens of a chunk.
    """

    def __init__(self, model: FunctionalModel, parameters: Parameters, *, longest: int) -> None:
        self._model, self._parameters = model, parameters
        self.width = max(model.execution.prefill_chunks)
        unit = math.lcm(self.width, kv_pages.BLOCK)  # the last chunk's padding lies in the page
        self._room = -(-longest // unit) * unit
        self._pages = model.new_pages(1, self._room)
        arguments = (
            model.parameter_structs(),
            model.page_structs(1, self._room),
            jax.ShapeDtypeStruct((self.width,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        self._program = ProgramSpec(self._chunk, arguments, (1,)).compile(model.mesh)

    def logits(self, text: np.ndarray) -> Iterator[jax.Array]:
        """Of the token that follows each of a text [n] int32, n at most `longest`: chunks of
        [width, outputs] float32, which hold for its tokens and not for what pads the last one."""
        padded = np.zeros(-(-len(text) // self.width) * self.width, np.int32)
        padded[: len(text)] = text
        for start in range(0, len(padded), self.width):
            logits, self._pages = self._program(
                self._parameters,
                self._pages,
                padded[start : start + self.width],
                np.int32(start),
            )
            yield logits

    def _chunk(self, parameters: Parameters, pages, tokens, start):
        module = self._model.module(parameters)
        positions = (start + jnp.arange(self.width))[None]
        table = kv_pages.Contiguous()
        hidden, pages, _ = module.hidden(tokens[None], positions, positions + 1, pages, table)
        return module.logits(hidden[0]), pages
