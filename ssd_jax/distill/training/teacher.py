"""Where p comes from: what lies beside the texts, or the target itself, run on every batch."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.load import load_arrays
from ssd_jax.distill.training.losses import Known, Sums, Weights, from_all, from_top
from ssd_jax.distill.training.packing import Batch
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sequence import sequence_hidden, sequence_logits


class Rows(NamedTuple):
    """What is known of p at positions [n]; `hidden` is the live target's."""

    top_ids: jax.Array  # [n, N] int32
    top_probs: jax.Array  # [n, N] float32
    hidden: jax.Array  # [n, hidden] float32, or [n, 0]


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The target as training needs it.

    Attributes:
      live: the target's modules where it is run on every batch; None: cached probabilities.
      tokens: ids of the tokenizer; rows of the live target's head beyond them are padding.
    """

    live: FunctionalModel | None = None
    tokens: int = 0

    def rows(self, parameters: list[jax.Array], batch: Batch) -> Rows:
        """What is known of p at every position of a batch."""
        count = batch.tokens.size
        if self.live is None:
            hidden = jnp.zeros((count, 0), jnp.float32)
        else:
            parts = (batch.tokens, batch.positions, batch.segments)
            module = self.live.module(parameters)
            hidden = sequence_hidden(module, *(jnp.asarray(part) for part in parts))
            hidden = hidden.reshape(count, -1)
        width = batch.top_ids.shape[-1]
        ids, probs = (
            jnp.asarray(x).reshape(count, width) for x in (batch.top_ids, batch.top_probs)
        )
        return Rows(ids, probs, hidden)

    def losses(
        self,
        parameters: list[jax.Array],
        rows: Rows,
        columns: jax.Array | None,
        logits: jax.Array,
        following: jax.Array,
        counted: jax.Array,
        weights: Weights,
    ) -> tuple[Sums, jax.Array]:
        """Losses of the draft's logits [n, V] and their gradient; see `losses.from_top`.

        Args:
          parameters: of the live target.
          rows: of the same positions as `logits`.
          columns: [vocabulary] int32, columns of ids where the output vocabulary is reduced.
          following: [n] int32, ids.
        """
        following = following if columns is None else columns[following]
        if self.live is None:
            place = rows.top_ids if columns is None else columns[rows.top_ids]
            return from_top(logits, Known(place, rows.top_probs), following, counted, weights)
        theirs = sequence_logits(self.live.module(parameters), rows.hidden)
        exists = jnp.arange(theirs.shape[1]) < self.tokens
        p = jax.nn.softmax(jnp.where(exists, theirs, -jnp.inf))
        largest = jnp.max(p, axis=1)
        if columns is not None:
            ids = jnp.zeros(logits.shape[1], columns.dtype)
            ids = ids.at[columns].set(jnp.arange(len(columns), dtype=ids.dtype), mode="drop")
            p = p[:, ids]
        return from_all(logits, p, largest, following, counted, weights)


def load_live(target: Checkpoint, *, tokens: int, compute: str) -> tuple[Teacher, list[jax.Array]]:
    """The target in the dtype `compute`, and its parameters; `tokens` as in `Teacher`.

    Raises:
      InputError: its data cannot be read.
    """
    execution = Execution.for_platform(jax.default_backend(), compute)
    model = FunctionalModel(target.config, execution)
    arrays = load_arrays(target.tensors, model.wanted(), where=str(target.path))
    return Teacher(model, tokens), model.assemble(arrays)
