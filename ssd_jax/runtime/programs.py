"""Ahead-of-time compiled programs of a target: pure functions with static shapes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from ssd_jax.kernels import kv_pages
from ssd_jax.models.functional import AllPages, FunctionalModel, Parameters
from ssd_jax.runtime.rows import SamplingRows
from ssd_jax.speculation import history, proposal
from ssd_jax.speculation.history import History
from ssd_jax.speculation.settings import Sampling
from ssd_jax.speculation.verification import commit, verify


class Programs:
    """The target's compiled programs for one model, batch and context.

    Compilation needs no weights, so it can run while they load.

    Args:
      model: static description.
      slots: rows of a batched forward.
      context: most positions a sequence may have.
      tokens: how many ids exist; logits beyond are vocabulary padding.
      rule: verification rule, "ratio" or "coupled".
    """

    def __init__(
        self,
        model: FunctionalModel,
        *,
        slots: int,
        context: int,
        tokens: int,
        rule: str = "ratio",
    ) -> None:
        self.model = model
        self.slots = slots
        self.context = context
        self.page_size = -(-context // kv_pages.BLOCK) * kv_pages.BLOCK
        self._tokens = tokens
        self._rule = rule
        jobs = {("accept", rows): self._accept_job(rows) for rows in {1, slots}}
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

        def prefill(parameters: Parameters, pages: AllPages, heard: History, tokens, where):
            slot, offset, count = where
            index = jnp.arange(width)[None]
            real = index < count
            positions = jnp.where(real, offset + index, self.page_size)
            visible = jnp.where(real, positions + 1, 0)
            table = jnp.reshape(slot, (1, 1))
            model = self.model.module(parameters)
            hidden, pages = model.hidden(tokens, positions, visible, pages, table)
            ids = jnp.where(real, tokens, self.model.config.vocab_size)[0]
            heard = history.add_prompt(heard, slot, ids, offset == 0)
            last = jax.lax.dynamic_slice_in_dim(hidden[0], count - 1, 1)
            return model.logits(last)[None], pages, heard

        tokens = jax.ShapeDtypeStruct((1, width), jnp.int32)
        where = jax.ShapeDtypeStruct((3,), jnp.int32)
        arguments = (self.model.parameter_structs(), self._pages(), self._history())
        return prefill, (*arguments, tokens, where), (1, 2)

    def _accept_job(self, rows: int):
        """`accept` of every slot, or of one slot whose number is an argument."""

        def accept(logits, sampling: Sampling, start, heard: History, slot):
            own = heard if rows == self.slots else _row(heard, slot)
            nothing = proposal.none(rows)
            outcome = verify(
                logits, nothing, sampling, start, own, tokens=self._tokens, rule=self._rule
            )
            said = commit(own, nothing, outcome, start >= 0)
            if rows != self.slots:
                said = heard._replace(output=heard.output.at[slot].set(said.output[0]))
            return outcome.bonus, said

        vocab = self.model.config.vocab_size
        logits = jax.ShapeDtypeStruct((rows, 1, vocab), jnp.float32)
        start = jax.ShapeDtypeStruct((rows,), jnp.int32)
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        sampling = SamplingRows(rows, vocab).structs()
        return accept, (logits, sampling, start, self._history(), slot), (3,)

    def new_history(self) -> History:
        """No tokens in any slot."""
        return history.empty(self.slots, self.model.config.vocab_size)

    def _history(self) -> History:
        return jax.eval_shape(self.new_history)

    def _pages(self):
        return self.model.page_structs(self.slots, self.page_size)


def _row(heard: History, slot: jax.Array) -> History:
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, slot, 1), heard)


def _compile(function, arguments, donate) -> jax.stages.Compiled:
    return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()


def _positions(lengths: jax.Array, width: int, outside: int) -> jax.Array:
    """Positions [B, width] from lengths [B, 1]; rows that are idle lie outside the pages."""
    positions = lengths + jnp.arange(width)[None]
    return jnp.where(lengths < 0, outside, positions)
