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
from ssd_jax.speculation.proposal import Proposal
from ssd_jax.speculation.settings import Sampling

UNSEEN = 2
"""Most committed tokens whose keys and values a draft lacks after a round: the last token of a
speculation that was accepted whole, and the bonus token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """What `propose` is compiled for.

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

    `prefill`: see `passes.prefill_job`. `propose`: (parameters, pages, history, committed
    [B, k + 1], unseen [B, 2], counts [B], lengths [B], limits [B], sampling) -> proposal, pages,
    history. `committed` are the tokens since the last proposal, padded with -1; the last
    `counts` (1 or 2) of them are `unseen`, left-aligned, the first of which belongs at position
    `lengths` (-1: idle). Row b proposes `limits[b]` tokens.

    Every step writes the key and value of the token it runs where it belongs, so that the pages
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
        jobs: dict[Name, Job] = {("propose", drafting.k): self._propose_job()}
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

    def _propose_job(self) -> Job:
        about, model, vocab = self.drafting, self.model, self.model.config.vocab_size
        support = min(about.support, vocab)

        def propose(
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
            live = lengths >= 0
            start = lengths + counts - 1  # the pending token's position

            def run(pages, tokens, positions):
                positions = jnp.where(live[:, None], positions, -1)
                return passes.step(model, parameters, pages, tokens, positions, self.page_size)

            def draw(hidden, step, flying):
                return drafting.draw(
                    passes.logits(model, parameters, hidden),
                    sampling,
                    start,
                    step,
                    flying,
                    tokens=self._tokens,
                    support=support,
                    rule=about.rule,
                )

            offsets = jnp.arange(UNSEEN)
            positions = jnp.where(offsets < counts[:, None], lengths[:, None] + offsets, -1)
            hidden, pages = run(pages, unseen, positions)
            pending = jnp.take_along_axis(hidden, (counts - 1)[:, None, None], axis=1)[:, 0]
            first = draw(pending, 0, heard)
            drawn = jax.tree.map(
                lambda a: jnp.zeros((about.k, *a.shape), a.dtype).at[0].set(a), first
            )

            def body(step, carry):
                pages, flying, drawn = carry
                last = drawn.token[step - 1]
                flying = history.add_output(flying, jnp.where(live, last, -1)[:, None])
                hidden, pages = run(pages, last[:, None], (start + step)[:, None])
                new = draw(hidden[:, 0], step, flying)
                drawn = jax.tree.map(lambda all_, one: all_.at[step].set(one), drawn, new)
                return pages, flying, drawn

            pages, _, drawn = jax.lax.fori_loop(1, jnp.max(limits), body, (pages, heard, drawn))
            return _proposal(drawn, limits, about.rule), pages, heard

        rows = jax.ShapeDtypeStruct((self.slots,), jnp.int32)
        arguments = (
            model.parameter_structs(),
            model.page_structs(self.slots, self.page_size),
            passes.history_structs(self.slots, vocab),
            jax.ShapeDtypeStruct((self.slots, about.k + 1), jnp.int32),
            jax.ShapeDtypeStruct((self.slots, UNSEEN), jnp.int32),
            rows,
            rows,
            rows,
            SamplingRows(self.slots, vocab).structs(),
        )
        return Job(propose, arguments, (1, 2))


def _proposal(drawn: Draw, limits: jax.Array, rule: str) -> Proposal:
    """Draws [K, B, ...] as a proposal; without a q where the rule does not look at it."""
    tokens, support, q = (jnp.moveaxis(array, 0, 1) for array in drawn)
    if rule == "coupled":
        support, q = tokens[:, :, None], jnp.ones((*tokens.shape, 1), jnp.float32)
    return Proposal(tokens, limits, support, q)
