"""Ahead-of-time compiled programs of a draft model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32
from typing_extensions import override

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.devices.draft import record
from ssd_jax.devices.draft.record import Record
from ssd_jax.devices.programs import passes, program_spec
from ssd_jax.devices.programs.batch_sizes import BatchPlan, Task
from ssd_jax.devices.programs.batched import BatchedPrograms, LeftOut, MakeSpec
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.devices.programs.program_spec import Compiler, Name, ProgramSpec
from ssd_jax.kernels.kv_pages import PageArray, chain_path
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.roles.drafting import Drafting
from ssd_jax.sampling import drafting, penalties
from ssd_jax.sampling.drafting import Draw, Saguaro
from ssd_jax.sampling.penalties import GetHistory, History
from ssd_jax.sampling.rules import RULES
from ssd_jax.sampling.settings import Sampling, greedy_where_idle
from ssd_jax.sampling.variants import Needed, Parts

Array = Any
"""On the host where a program is called, traced in it."""

UNSEEN = 2
"""Most committed tokens whose keys and values a draft lacks after a round: the last token of a
speculation that was fully accepted, and the bonus token."""


class DraftRequest(NamedTuple):
    """Proposals that B rows of a draft are to make.

    Attributes:
      committed: tokens since the last proposal, padded with -1.
      unseen: the last 1 or 2 of them, left-aligned.
      counts: number of unseen tokens.
      lengths: position of the first unseen token; -1: the row keeps its record, or, in programs
        without branches (mode sd), proposes nothing.
      limits: number of tokens to propose.
    """

    committed: Int32[Array, "B committed"]
    unseen: Int32[Array, "B 2"]
    counts: Int32[Array, "B"]
    lengths: Int32[Array, "B"]
    limits: Int32[Array, "B"]


def _without_proposal(records: Record) -> Record:
    """Records of rows that a batch leaves out, whose last proposal was judged already."""
    length = jnp.zeros_like(records.proposal.length)
    return records._replace(proposal=records.proposal._replace(length=length))


class DraftPrograms(BatchedPrograms):
    """The draft's compiled programs for one model, batch and context.

    `start` -> record, pages, history: draws the first token of the proposals that are asked for.
    `step` -> record, pages: runs the last drawn token of `rows` [B] bool and draws the next, whose
    index in the proposal is `index` []. `lowered` [B, k] holds D of Saguaro sampling. Both have
    variants (`sampling/variants.py`); variants that adjust no logits leave the history as it is.

    With `defer`, these two exist only after `complete`; see `drafts`. A `compiler` gets the
    programs instead of `program_spec.compile_all`.

    Each program is one forward. The host loops over them: a loop on the device would copy the
    parameters where XLA cannot see that they do not change, and could not stop when the outcome is
    known.

    Every forward writes the key and value of its token where they belong, so that the pages hold
    the record's KV (the pending token and all proposed tokens but the last) in place: an accepted
    prefix is promoted by its length alone.

    Attributes:
      candidates: W: enough for all branches to be of one k, whose drafted token is no candidate.
      variants: of the programs that draw. Truncating N ids costs nothing; where noise ranks bonus
        tokens, all ids are truncated.
    """

    def __init__(
        self,
        model: FunctionalModel,
        *,
        slots: int,
        context: int,
        tokens: int,
        drafting: Drafting,
        paging: Paging | None = None,
        batches: BatchPlan | None = None,
        defer: bool = False,
        progress: Progress | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        if model.config.output_size is not None and model.output_ids is None:
            raise ValueError("a reduced output vocabulary needs the ids of its tokens")
        self.drafting, self.tokens = drafting, tokens
        branches, outputs = drafting.branches, model.config.outputs
        self.candidates = min(branches + 1, outputs) if branches else 0
        super().__init__(model, slots, context, paging, tokens, drafting)
        self.batches = (batches or BatchPlan()).below(self.local_slots)
        all_variants = model.execution.variants
        keep_all = drafting.predict == "noise"
        self.variants = (
            all_variants if keep_all else tuple(v for v in all_variants if v != "sampled")
        )
        self.structs["index"] = program_spec.ints()
        specs = {} if defer else self.specs() | self._specs_at_start()
        specs |= self.prompt_specs(with_logits=False)
        compiler = compiler or program_spec.compile_all
        self._compiled = dict(compiler(specs, model.mesh, progress))
        if not defer:
            self._offer_batches()

    @override
    def slot_structs(self) -> dict[str, Any]:
        slots, k = self.slots, self.drafting.k
        one_per_slot = program_spec.ints(slots)
        committed, unseen = program_spec.ints(slots, k + 1), program_spec.ints(slots, UNSEEN)
        structs = {
            "records": jax.eval_shape(lambda: self.records(slots)),
            "request": DraftRequest(committed, unseen, one_per_slot, one_per_slot, one_per_slot),
            "lowered": program_spec.ints(slots, k),
            "rows": jax.ShapeDtypeStruct((slots,), jnp.bool_),
        }
        return super().slot_structs() | self.by_slots(structs)

    @property
    @override
    def tasks(self) -> tuple[Task, ...]:
        """A draft."""
        return (self.drafting.k,)

    @override
    def makers(self) -> Iterator[tuple[Name, str, MakeSpec]]:
        specs = {"start": DraftPrograms._start_spec, "step": DraftPrograms._step_spec}
        return self.of_variants(self.variants, specs, self.drafting.k)

    @override
    def left_out(self) -> LeftOut:
        return {} if self.drafting.branches else {"start": {"records": _without_proposal}}

    @property
    def drafts(self) -> bool:
        """Whether `start` and `step` are compiled."""
        return any(name[0] == "start" for name in self._compiled)

    def complete(self) -> None:
        """Compiles `start` and `step`, at any time and in any thread."""
        specs = self.specs() | self._specs_at_start()
        self._add(program_spec.compile_all(specs, self.model.mesh))
        self._offer_batches()

    def draft(
        self,
        parameters: Parameters,
        pages: PageArray,
        history: History,
        table: Int32[Array, "B P"] | None,
        records: Record,
        request: DraftRequest,
        lowered: Int32[np.ndarray, "B K"],
        sampling: Sampling,
        needed: Needed,
    ) -> tuple[Record, PageArray, History]:
        """Drafts records of the asked number of tokens; idle rows keep theirs, see `DraftRequest`.

        `needed` returns the parts of sampling that the other rows need.
        """
        rows, k = request.lengths >= 0, self.drafting.k
        end = int((request.lengths + request.counts + request.limits).max())
        size = self.choose_size(rows, k)
        start, step = (
            self.select(self.batch_name(self.select_reach((name, k), end), size), needed)
            for name in ("start", "step")
        )
        text = parameters, pages, history, table
        records, pages, history = start(*text, records, request, lowered, sampling)
        for index in range(1, int(request.limits.max())):
            text = parameters, pages, history, table
            records, pages = step(*text, records, np.int32(index), rows, lowered, sampling)
        return records, pages, history

    def records(self, rows: int) -> Record:
        """Idle records."""
        drafting, config = self.drafting, self.model.config
        support = min(drafting.support, config.outputs) if RULES[drafting.rule].ships_q else 1
        hidden = config.hidden_size if drafting.branches and drafting.predict == "noise" else 0
        return record.empty(rows, drafting.k, support, self.candidates, hidden)

    def draw(
        self,
        logits: Float32[Array, "B outputs"],
        sampling: Sampling,
        start: Int32[Array, "B"],
        step: Int32[Array, ""] | Int32[Array, "B"],
        history: GetHistory,
        lowered: Int32[Array, "B"],
        parts: Parts,
    ) -> Draw:
        """Draws a token of each row as `drafting.draw` does; `lowered` is D of Saguaro sampling."""
        setup = self.drafting
        drawn = drafting.draw(
            logits,
            sampling,
            start,
            step,
            history,
            tokens=self.tokens,
            support=min(setup.support, logits.shape[1]),
            rule=setup.rule,
            candidates=self.candidates,
            saguaro=Saguaro(setup.saguaro_c, lowered) if setup.saguaro_c < 1 else None,
            confident=setup.confident,
            outputs=self.model.output_ids,
            parts=parts,
        )
        if not RULES[setup.rule].ships_q:
            token = drawn.token[:, None]
            return drawn._replace(support=token, q=jnp.ones(token.shape, jnp.float32))
        return drawn

    def _start_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        def start(parameters, pages, history, table, records, request, lowered, sampling):
            committed, unseen, counts, lengths, limits = request
            if parts.adjusted is not False:
                history = penalties.add_output(history, committed)
            live = lengths >= 0
            present = live[:, None] & (jnp.arange(UNSEEN) < counts[:, None])
            positions = jnp.where(present, lengths[:, None] + jnp.arange(UNSEEN), -1)
            hidden, pages = self._run(
                parameters, pages, self.table(table, reach), unseen, positions
            )
            last = (counts - 1)[:, None]
            hidden = jnp.take_along_axis(hidden, last[:, :, None], axis=1)[:, 0]
            new_records = self.records(self.local_slots)
            new_records = new_records._replace(
                start=jnp.where(live, lengths + counts - 1, -1),
                pending=jnp.take_along_axis(unseen, last, axis=1)[:, 0],
                proposal=new_records.proposal._replace(length=limits),
            )
            index = jnp.array(0)
            new_records = self._draw(
                parameters, hidden, sampling, index, lowered, history, new_records, live, parts
            )
            idle_records = records
            if not self.drafting.branches:
                idle_records = _without_proposal(records)
            return record.where(live, new_records, idle_records), pages, history

        results, donated = ("records", "pages", "history"), ("pages", "history", "records")
        host_args = ("request", "lowered")
        return self.spec(start, self.structs, donated, results, host_args=host_args)

    def _step_spec(self, parts: Parts, reach: int) -> ProgramSpec:
        def step(parameters, pages, history, table, records, index, rows, lowered, sampling):
            live = rows & (index < records.proposal.length)
            last = jnp.take(records.proposal.tokens, index - 1, axis=1)[:, None]
            positions = jnp.where(live, records.start + index, -1)[:, None]
            hidden, pages = self._run(parameters, pages, self.table(table, reach), last, positions)
            new_records = self._draw(
                parameters, hidden[:, 0], sampling, index, lowered, history, records, live, parts
            )
            return new_records, pages

        results, host_args = ("records", "pages"), ("rows", "lowered", "index")
        return self.spec(step, self.structs, ("pages", "records"), results, host_args=host_args)

    def _run(self, parameters: Parameters, pages: PageArray, table, tokens, positions):
        return passes.step(self.model, parameters, pages, table, tokens, positions, self.capacity)

    def _draw(
        self,
        parameters: Parameters,
        hidden: Float32[Array, "B hidden"],
        sampling: Sampling,
        index: Int32[Array, ""],
        lowered: Int32[Array, "B K"],
        history: History,
        records: Record,
        live: Bool[Array, "B"],
        parts: Parts,
    ) -> Record:
        """Draws token `index` of the live rows from `hidden` and puts it into their records."""
        rows = jnp.arange(self.local_slots)
        place = jnp.broadcast_to(index, rows.shape)
        outputs = self.model.output_ids
        drawn = self.draw(
            passes.logits(self.model, parameters, hidden),
            greedy_where_idle(sampling, live),
            records.start,
            index,
            lambda: penalties.in_flight(
                history, records.proposal.tokens, rows, chain_path(place), outputs
            ),
            lowered[:, index],
            parts,
        )
        return record.put(records, drawn, hidden, place, live)
