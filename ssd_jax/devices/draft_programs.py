"""Ahead-of-time compiled programs of a draft model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.devices import passes, record
from ssd_jax.devices.passes import Name, ProgramSpec
from ssd_jax.devices.record import Record
from ssd_jax.devices.sampling_rows import SamplingRows
from ssd_jax.devices.target import pad_chunk
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import AllPages, FunctionalModel, Parameters
from ssd_jax.sampling import drafting, penalties
from ssd_jax.sampling.drafting import Draw, Saguaro
from ssd_jax.sampling.outputs import Outputs
from ssd_jax.sampling.penalties import GetHistory, History
from ssd_jax.sampling.settings import Sampling

UNSEEN = 2
"""Most committed tokens whose keys and values a draft lacks after a round: the last token of a
speculation that was accepted whole, and the bonus token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """What a draft's programs are compiled for.

    Attributes:
      k: tokens of a proposal.
      support: most ids of a proposal's q; as many as the model has outputs keep all.
      rule: the verification's, "ratio" or "coupled"; coupled proposals ship no q.
      branches: M, most branches a sequence; 0 where none are made.
      saguaro_c: C of Saguaro sampling; 1 is plain sampling.
      predict: how bonus tokens of sampled rows are ranked: "plain" by the draft's law, "noise" by
        the noise of their verification as well.
      confident: whether draws report the draft's probability of their tokens.
    """

    k: int
    support: int
    rule: str
    branches: int = 0
    saguaro_c: float = 1.0
    predict: str = "plain"
    confident: bool = False

    def candidates(self, outputs: int) -> int:
        """W: enough for all branches to be of one k, whose drafted token is no candidate."""
        return min(self.branches + 1, outputs) if self.branches else 0

    def empty(self, rows: int, model: ModelConfig) -> Record:
        """Idle records of a model."""
        support = 1 if self.rule == "coupled" else min(self.support, model.outputs)
        hidden = model.hidden_size if self.branches and self.predict == "noise" else 0
        return record.empty(rows, self.k, support, self.candidates(model.outputs), hidden)

    def draw(
        self,
        logits: jax.Array,
        sampling: Sampling,
        start: jax.Array,
        step: jax.Array,
        history: GetHistory,
        lowered: jax.Array,
        *,
        tokens: int,
        outputs: Outputs,
    ) -> Draw:
        """See `drafting.draw`; `lowered` [] or [n] are the D of Saguaro sampling."""
        columns = logits.shape[1]
        drawn = drafting.draw(
            logits,
            sampling,
            start,
            step,
            history,
            tokens=tokens,
            support=min(self.support, columns),
            rule=self.rule,
            candidates=self.candidates(columns),
            saguaro=Saguaro(self.saguaro_c, lowered) if self.saguaro_c < 1 else None,
            confident=self.confident,
            outputs=outputs,
        )
        if self.rule == "coupled":  # its verification looks at no q
            token = drawn.token[:, None]
            return drawn._replace(support=token, q=jnp.ones(token.shape, jnp.float32))
        return drawn


class DraftPrograms:
    """The draft's compiled programs for one model, batch and context.

    `prefill`: see `passes.prefill_spec`.

    `start`: (parameters, pages, history, record, committed [B, k + 1], unseen [B, 2], counts [B],
    lengths [B], limits [B], lowered [B, k], sampling) -> record, pages, history. `committed` are
    tokens since the last proposal, padded with -1; the last `counts` (1 or 2) of them are `unseen`,
    left-aligned, the first of which belongs at position `lengths` (-1: the row keeps the record it
    has). Row b is to propose `limits[b]` tokens; this draws the first. `lowered` are the D of
    Saguaro sampling.

    `step`: (parameters, pages, history, record, index [], rows [B] bool, lowered, sampling) ->
    record, pages runs the last drawn token of these rows and draws the next, whose number in the
    proposal is `index`.

    With `late`, these two are there after `complete` only; `drafts` tells.

    Each is one forward. The host loops over them: a loop on the device would copy the parameters
    where XLA cannot see that they stay as they are, and could not stop when the outcome is known.

    Every forward writes the key and value of the token it runs where it belongs, so that the pages
    hold the record's KV (the pending token and all proposed ones but the last) in place: whatever
    prefix is accepted is promoted by its length alone.
    """

    def __init__(
        self,
        model: FunctionalModel,
        *,
        slots: int,
        context: int,
        tokens: int,
        drafting: Drafting,
        late: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if model.config.output_size is not None and model.output_ids is None:
            raise ValueError("a reduced output vocabulary needs the ids of its tokens")
        self.model = model
        self.slots = slots
        self.page_size = passes.page_size(context)
        self.drafting = drafting
        self.tokens = tokens
        self._late: dict[Name, ProgramSpec] = {
            ("start", drafting.k): self._start_spec(),
            ("step", drafting.k): self._step_spec(),
        }
        specs = {} if late else dict(self._late)
        for width in model.execution.prefill_chunks:
            specs["prefill", width] = passes.prefill_spec(
                model, slots=slots, size=self.page_size, width=width, with_logits=False
            )
        self._compiled = passes.compile_all(specs, model.mesh, progress)

    def __getitem__(self, name: Name) -> jax.stages.Compiled:
        return self._compiled[name]

    @property
    def drafts(self) -> bool:
        """Whether `start` and `step` are there."""
        return ("start", self.drafting.k) in self._compiled

    def complete(self) -> None:
        """Compiles them, at any time and in any thread."""
        self._compiled = self._compiled | passes.compile_all(self._late, self.model.mesh)

    def prefill(
        self,
        parameters: Parameters,
        pages: AllPages,
        history: History,
        slot: int,
        tokens: Sequence[int],
        offset: int,
    ) -> tuple[AllPages, History]:
        """Writes the keys and values of any number of prompt tokens of a slot, in chunks."""
        chunks = self.model.execution.prefill_chunks
        most = max(chunks)
        for begin in range(0, len(tokens), most):
            part = tokens[begin : begin + most]
            padded, where = pad_chunk(slot, part, offset + begin, chunks)
            program = self["prefill", padded.shape[1]]
            pages, history, _ = program(parameters, pages, history, padded, where)
        return pages, history

    def new_pages(self) -> AllPages:
        """Zeroed pages for every slot."""
        return self.model.new_pages(self.slots, self.page_size)

    def new_history(self) -> History:
        """No tokens in any slot."""
        return penalties.empty(self.slots, self.model.config.vocab_size)

    def new_record(self) -> Record:
        """Idle records of every slot."""
        return self.drafting.empty(self.slots, self.model.config)

    def _start_spec(self) -> ProgramSpec:
        def start(
            parameters: Parameters,
            pages: AllPages,
            history: History,
            kept: Record,
            committed,
            unseen,
            counts,
            lengths,
            limits,
            lowered,
            sampling: Sampling,
        ):
            history = penalties.add_output(history, committed)
            live = lengths >= 0
            known = live[:, None] & (jnp.arange(UNSEEN) < counts[:, None])
            positions = jnp.where(known, lengths[:, None] + jnp.arange(UNSEEN), -1)
            hidden, pages = self._run(parameters, pages, unseen, positions)
            last = (counts - 1)[:, None]
            hidden = jnp.take_along_axis(hidden, last[:, :, None], axis=1)[:, 0]
            fresh = self.new_record()
            fresh = fresh._replace(
                start=jnp.where(live, lengths + counts - 1, -1),
                pending=jnp.take_along_axis(unseen, last, axis=1)[:, 0],
                proposal=fresh.proposal._replace(length=limits),
            )
            fresh = self._draw(
                parameters, hidden, sampling, jnp.array(0), lowered, history, fresh, live
            )
            return record.where(live, fresh, kept), pages, history

        rows = jax.ShapeDtypeStruct((self.slots,), jnp.int32)
        arguments = (
            *self._state_structs(),
            jax.ShapeDtypeStruct((self.slots, self.drafting.k + 1), jnp.int32),
            jax.ShapeDtypeStruct((self.slots, UNSEEN), jnp.int32),
            rows,
            rows,
            rows,
            jax.ShapeDtypeStruct((self.slots, self.drafting.k), jnp.int32),
            self._sampling_structs(),
        )
        return ProgramSpec(start, arguments, (1, 2, 3))

    def _step_spec(self) -> ProgramSpec:
        def step(
            parameters: Parameters,
            pages: AllPages,
            history: History,
            kept: Record,
            index,
            rows,
            lowered,
            sampling: Sampling,
        ):
            live = rows & (index < kept.proposal.length)
            last = jnp.take(jnp.asarray(kept.proposal.tokens), index - 1, axis=1)[:, None]
            positions = jnp.where(live, kept.start + index, -1)[:, None]
            hidden, pages = self._run(parameters, pages, last, positions)
            new = self._draw(
                parameters, hidden[:, 0], sampling, index, lowered, history, kept, live
            )
            return new, pages

        arguments = (
            *self._state_structs(),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((self.slots,), jnp.bool_),
            jax.ShapeDtypeStruct((self.slots, self.drafting.k), jnp.int32),
            self._sampling_structs(),
        )
        return ProgramSpec(step, arguments, (1, 3))

    def _run(self, parameters: Parameters, pages: AllPages, tokens, positions):
        return passes.step(self.model, parameters, pages, tokens, positions, self.page_size)

    def _draw(
        self,
        parameters: Parameters,
        hidden: jax.Array,
        sampling: Sampling,
        index: jax.Array,
        lowered: jax.Array,
        history: History,
        into: Record,
        live: jax.Array,
    ) -> Record:
        """Puts token `index` of the live rows, which follows hidden [B, hidden], into records."""
        every = jnp.arange(self.slots)
        place = jnp.broadcast_to(index, every.shape)
        outputs = self.model.output_ids
        drawn = self.drafting.draw(
            passes.logits(self.model, parameters, hidden),
            sampling,
            into.start,
            index,
            lambda: penalties.in_flight(history, into.proposal.tokens, every, place, outputs),
            lowered[:, index],
            tokens=self.tokens,
            outputs=outputs,
        )
        return record.put(into, drawn, hidden, place, live)

    def _state_structs(self):
        return (
            self.model.parameter_structs(),
            self.model.page_structs(self.slots, self.page_size),
            passes.history_structs(self.slots, self.model.config.vocab_size),
            jax.eval_shape(self.new_record),
        )

    def _sampling_structs(self) -> Sampling:
        return SamplingRows(self.slots, self.model.config.vocab_size).structs()
