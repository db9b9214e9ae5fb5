"""Ahead-of-time compiled programs of a target: pure functions with static shapes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from ssd_jax.kernels import kv_pages
from ssd_jax.models.functional import AllPages, FunctionalModel, Parameters
from ssd_jax.runtime.rows import SamplingRows
from ssd_jax.speculation.probs import Sampling
from ssd_jax.speculation.sampling import sample


class Programs:
    """The target's compiled programs for one model, batch and context.

    Compilation needs no weights, so it can run while they load.

    Args:
      model: static description.
      slots: rows of a batched forward.
      context: most positions a sequence may have.
      tokens: how many ids exist; logits beyond are vocabulary padding.
    """

    def __init__(
        self,
        model: FunctionalModel,
        *,
        slots: int,
        context: int,
        tokens: int,
    ) -> None:
        self.model = model
        self.slots = slots
        self.context = context
        self.page_size = -(-context // kv_pages.BLOCK) * kv_pages.BLOCK
        self._tokens = tokens
        jobs = {("sample", rows): self._sample_job(rows) for rows in {1, slots}}
        jobs |= {("forward", 1): self._forward_job(1)}
        chunks = model.execution.prefill_chunks
        jobs |= {("prefill", width): self._prefill_job(width) for width in chunks}
        # Tracing holds the interpreter lock, compiling does not: two threads overlap them.
        with ThreadPoolExecutor(2) as pool:
            futures = {name: pool.submit(_compile, *job) for name, job in jobs.items()}
            self._compiled = {name: future.result() for name, future in futures.items()}

    def __getitem__(self, name: tuple[str, int]) -> jax.stages.Compiled:
        return self._compiled[name]

    def new_pages(self) -> AllPages:
        """Zeroed pages for every slot."""
        return self.model.new_pages(self.slots, self.page_size)

    def compile_forward(self, width: int) -> jax.stages.Compiled:
        """`forward`: (parameters, pages, tokens [B, width], lengths [B]) -> logits, pages."""
        return _compile(*self._forward_job(width))

    def _forward_job(self, width: int):
        def forward(parameters: Parameters, pages: AllPages, tokens, lengths):
            positions = _positions(lengths[:, None], width, self.page_size)
            visible = jnp.where(lengths[:, None] < 0, 0, positions + 1)
            model = self.model.module(parameters)
            table = kv_pages.Contiguous()
            hidden, pages = model.hidden(tokens, positions, visible, pages, table)
            logits = model.logits(hidden.reshape(tokens.size, -1))
            return logits.reshape(*tokens.shape, -1), pages

        tokens = jax.ShapeDtypeStruct((self.slots, width), jnp.int32)
        lengths = jax.ShapeDtypeStruct((self.slots,), jnp.int32)
        return forward, (self.model.parameter_structs(), self._pages(), tokens, lengths), (1,)

    def _prefill_job(self, width: int):
        """Arguments beside the tokens: [slot, offset, number of tokens that are not padding]."""

        def prefill(parameters: Parameters, pages: AllPages, tokens, where):
            slot, offset, count = where
            index = jnp.arange(width)[None]
            positions = jnp.where(index < count, offset + index, self.page_size)
            visible = jnp.where(index < count, positions + 1, 0)
            table = jnp.reshape(slot, (1, 1))
            model = self.model.module(parameters)
            hidden, pages = model.hidden(tokens, positions, visible, pages, table)
            last = jax.lax.dynamic_slice_in_dim(hidden[0], count - 1, 1)
            return model.logits(last)[None], pages

        tokens = jax.ShapeDtypeStruct((1, width), jnp.int32)
        where = jax.ShapeDtypeStruct((3,), jnp.int32)
        return prefill, (self.model.parameter_structs(), self._pages(), tokens, where), (1,)

    def _sample_job(self, rows: int):
        def draw(logits: jax.Array, sampling: Sampling, start: jax.Array) -> jax.Array:
            return sample(logits[:, 0], sampling, start, tokens=self._tokens)

        logits = jax.ShapeDtypeStruct((rows, 1, self.model.config.vocab_size), jnp.float32)
        start = jax.ShapeDtypeStruct((rows,), jnp.int32)
        return draw, (logits, SamplingRows(rows).structs(), start), ()

    def _pages(self):
        return self.model.page_structs(self.slots, self.page_size)


def _compile(function, arguments, donate) -> jax.stages.Compiled:
    return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()


def _positions(lengths: jax.Array, width: int, outside: int) -> jax.Array:
    """Positions [B, width] from lengths [B, 1]; rows that are idle lie outside the pages."""
    positions = lengths + jnp.arange(width)[None]
    return jnp.where(lengths < 0, outside, positions)
