"""Only the forwards of a target, compiled and run by hand: no prefill."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import numpy as np

from ssd_jax.devices.opening.models import open_model
from ssd_jax.devices.programs import program_spec
from ssd_jax.devices.target.base import Verification
from ssd_jax.devices.target.programs import Programs
from ssd_jax.roles.records import IDLE


def forwards_only(kinds=("forward",)):
    """Inside this, `Programs` compile nothing else, which saves most of their time."""
    everything = program_spec.compile_all

    def some(jobs, mesh, progress=None):
        chosen = {name: job for name, job in jobs.items() if name[0] in kinds}
        return everything(chosen, mesh, progress)

    return mock.patch.object(program_spec, "compile_all", some)


@dataclasses.dataclass(frozen=True)
class Forwards:
    """Programs of a checkpoint opened for the bitwise mode, and its parameters."""

    programs: Programs
    parameters: list[jax.Array]

    @classmethod
    def of(
        cls, path, dtype, *, slots, context, widths, programs=Programs, accepts=False
    ) -> Forwards:
        opened = open_model(str(path), dtype, bitwise=True)
        with forwards_only(("forward", "accept") if accepts else ("forward",)):
            compiled = programs(
                opened.model,
                slots=slots,
                context=context,
                tokens=opened.tokenizer.size,
                verification=Verification(widths=widths),
            )
        return cls(compiled, opened.load())

    def logits(self, text, width, *, slot=0, neighbour=None, first=0) -> np.ndarray:
        """Logits [len(text), V] of a text that is run width + 1 tokens at a time.

        Args:
          neighbour: (token, length) of the other slots in every forward; None leaves them idle.
          first: tokens that are run one by one beforehand, which sets where the blocks begin.
        """
        slots = self.programs.slots
        pages, rows, begin = self.programs.new_pages(), [], 0
        while begin < len(text):
            now = 0 if begin < first else width
            tokens = np.zeros((slots, self.programs.verification.widths[-1]), np.int32)
            pending, lengths = np.zeros(slots, np.int32), np.full(slots, IDLE, np.int32)
            if neighbour is not None:
                token, length = neighbour
                tokens[:], pending[:], lengths[:] = token, token, length
            part = np.asarray(text[begin : begin + now + 1], np.int32)
            pending[slot], lengths[slot] = part[0], begin
            tokens[slot] = 0
            tokens[slot, : len(part) - 1] = part[1:]
            logits, pages = self.programs["forward", now](
                self.parameters, pages, None, pending, tokens, lengths
            )
            first_row = slot * (now + 1)
            rows.append(np.asarray(logits[first_row : first_row + len(part)]))
            begin += len(part)
        return np.concatenate(rows)
