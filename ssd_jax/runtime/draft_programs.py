"""Ahead-of-time compiled programs of a draft model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ssd_jax.models.functional import AllPages, FunctionalModel, Parameters
from ssd_jax.runtime import passes
from ssd_jax.runtime.passes import Job, Name
from ssd_jax.runtime.rows import SamplingRows
from ssd_jax.speculation import drafting, history
from ssd_jax.speculation.drafting import Draw
from ssd_jax.speculation.history import History
from ssd_jax.speculation.proposal import Proposal, blank
from ssd_jax.speculation.settings import Sampling

UNSEEN = 2
"""Most committed tokens whose keys and values a draft lacks after a round: the last token of a
speculation that was accepted whole, and the bonus token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """What a draft's programs are compiled for.

    Attributes:
      k: tokens of a proposal.
      support: most ids of a proposal's q; the vocabulary's size keeps all.
      rule: the verification's, "ratio" or "coupled"; coupled proposals ship no q.
    """

    k: int
    support: int
    rule: str


class DraftPrograms:
    """The draft's compiled programs for one model, batch and context.

    `prefill`: see `passes.prefill_job`. `start`: (parameters, pages, history, committed
    [B, k + 1], unseen [B, 2], counts [B], lengths [B], limits [B], sampling) -> proposal, pages,
    history. `committed` are the tokens since the last proposal, padded with -1; the last
    `counts` (1 or 2) of them are `unseen`, left-aligned, the first of which belongs at position
    `lengths` (-1: idle). Row b is to propose `limits[b]` tokens; this draws the first of them.
    `step`: (parameters, pages, history, proposal, index [], start [B], sampling) -> proposal, pages
    runs the last drawn token and draws the next, whose number in the proposal is `index`; `start`
    are the positions of the pending tokens (-1: idle).

    Each is one forward. The host loops over them: a loop on the device would copy the parameters
    where XLA cannot see that they stay as they are, and could not stop when the outcome is known.

    Every forward writes the key and value of the token it runs where it belongs, so that the pages
    hold the record's KV (the pending token and all proposed ones but the last) in place: whatever
    prefix is accepted is promoted by its length alone.
    """

    def __init__(
        self, model: FunctionalModel, *, slots: int, context: int, tokens: int, drafting: Drafting
    ) -> None:
        self.model = model
        self.slots = slots
        self.page_size = passes.page_size(context)
        self.drafting = drafting
        self._tokens = tokens
        jobs: dict[Name, Job] = {
            ("start", drafting.k): self._start_job(),
            ("step", drafting.k): self._step_job(),
        }
        for width in model.execution.prefill_chunks:
            jobs["prefill", width] = passes.prefill_job(
                model, slots=slots, size=self.page_size, width=width, with_logits=False
            )
        self._compiled = passes.compile_all(jobs)

    def __getitem__(self, name: Name) -> jax.stages.Compiled:
        return self._compiled[name]

    def new_pages(self) -> AllPages:
        """Zeroed pages for every slot."""
        return self.model.new_pages(self.slots, self.page_size)

    def new_history(self) -> History:
        """No tokens in any slot."""
        return history.empty(self.slots, self.model.config.vocab_size)

    def _start_job(self) -> Job:
        def start(
            parameters: Parameters,
            pages: AllPages,
            heard: History,
            committed,
            unseen,
            counts,
            lengths,
            limits,
            sampling: Sampling,
        ):
            heard = history.add_output(heard, committed)
            offsets = jnp.arange(UNSEEN)
            known = (lengths[:, None] >= 0) & (offsets < counts[:, None])
            positions = jnp.where(known, lengths[:, None] + offsets, -1)
            hidden, pages = self._run(parameters, pages, unseen, positions)
            pending = jnp.take_along_axis(hidden, (counts - 1)[:, None, None], axis=1)[:, 0]
            empty = self._blank()._replace(length=limits)
            start = lengths + counts - 1  # the pending token's position
            return self._draw(parameters, pending, sampling, start, 0, heard, empty), pages, heard

        rows = self._rows_struct()
        arguments = (
            *self._state_structs(),
            jax.ShapeDtypeStruct((self.slots, self.drafting.k + 1), jnp.int32),
            jax.ShapeDtypeStruct((self.slots, UNSEEN), jnp.int32),
            rows,
            rows,
            rows,
            self._sampling_structs(),
        )
        return Job(start, arguments, (1, 2))

    def _step_job(self) -> Job:
        def step(
            parameters: Parameters,
            pages: AllPages,
            heard: History,
            proposal: Proposal,
            index,
            start,
            sampling: Sampling,
        ):
            last = jnp.take(jnp.asarray(proposal.tokens), index - 1, axis=1)[:, None]
            positions = jnp.where(start >= 0, start + index, -1)[:, None]
            hidden, pages = self._run(parameters, pages, last, positions)
            drawn = self._draw(parameters, hidden[:, 0], sampling, start, index, heard, proposal)
            return drawn, pages

        arguments = (
            *self._state_structs(),
            jax.eval_shape(self._blank),
            jax.ShapeDtypeStruct((), jnp.int32),
            self._rows_struct(),
            self._sampling_structs(),
        )
        return Job(step, arguments, (1, 3))

    def _run(self, parameters: Parameters, pages: AllPages, tokens, positions):
        return passes.step(self.model, parameters, pages, tokens, positions, self.page_size)

    def _draw(
        self, parameters: Parameters, hidden, sampling: Sampling, start, index, heard, proposal
    ) -> Proposal:
        """Puts token `index` of every row, which follows hidden [B, hidden], into the proposal."""
        every = jnp.arange(self.slots)
        before = jnp.broadcast_to(index, every.shape)
        drawn = drafting.draw(
            passes.logits(self.model, parameters, hidden),
            sampling,
            start,
            index,
            lambda: history.in_flight(heard, proposal.tokens, every, before),
            tokens=self._tokens,
            support=min(self.drafting.support, self.model.config.vocab_size),
            rule=self.drafting.rule,
        )
        if self.drafting.rule == "coupled":  # its verification looks at no q
            drawn = Draw(drawn.token, drawn.token[:, None], jnp.ones((self.slots, 1)))
        return Proposal(
            proposal.tokens.at[:, index].set(drawn.token),
            proposal.length,
            proposal.support.at[:, index].set(drawn.support),
            proposal.q.at[:, index].set(drawn.q),
        )

    def _blank(self) -> Proposal:
        support = 1 if self.drafting.rule == "coupled" else self.drafting.support
        return blank(self.slots, self.drafting.k, min(support, self.model.config.vocab_size))

    def _state_structs(self):
        return (
            self.model.parameter_structs(),
            self.model.page_structs(self.slots, self.page_size),
            passes.history_structs(self.slots, self.model.config.vocab_size),
        )

    def _sampling_structs(self) -> Sampling:
        return SamplingRows(self.slots, self.model.config.vocab_size).structs()

    def _rows_struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.slots,), jnp.int32)
