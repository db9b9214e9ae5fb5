"""A script of rounds for a draft of branches, on tiny models; see `rounds`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.devices.branches import draft as branch_draft
from ssd_jax.devices.branches.expansion_programs import ExpansionPrograms
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.programs.program_spec import ProgramSpec
from ssd_jax.kernels import rows
from ssd_jax.models.decoder import CausalLM
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.roles.drafting import Drafting
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny
from tests.devices.branches.plain_draft import Plain, Speculation
from tests.devices.branches.rounds import ALL, Outcome, Request, Rounds, Seen
from tests.models.golden import FLOAT32, parameters
from tests.sampling.rows import QUICKLY

SLOTS, K, M, CONTEXT, SUPPORT = 3, 4, 7, 128, 12
LOWERED = (3, 1, 2, 4)
BIAS = tuple((token, 4.0) for token in (65, 66, 70, 75))  # so that texts repeat themselves
PENALISED = SamplingParams(
    logit_bias=BIAS, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3
)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=2**33 + 5, logit_bias=BIAS)
REQUESTS = {
    0: Request(
        tuple(b"a greedy one whose prompt takes two chunks"), PENALISED, bad_word_ids=((65, 66),)
    ),
    1: Request(
        tuple(b"sampled, AFBK"),
        dataclasses.replace(SAMPLED, frequency_penalty=0.9, top_p=0.97),
        bad_word_ids=((66, 65), (70, 75), (75, 70, 66)),
    ),
    2: Request(tuple(b"no penalties"), SAMPLED, banned=(65, 66), ban_before=17),
}
SECOND = Request(tuple(b"the slot has another user now, greedy without anything"), SamplingParams())
FAN_OUTS = (
    {0: (7,), 1: (3, 4), 2: (2, 3, 2), 3: (2, 1, 1, 3), 4: (1, 2, 1, 1, 2)},
    {0: (7,), 1: (0, 7), 2: (0, 5, 2), 3: (3, 0, 2, 1), 4: (2, 0, 0, 4, 1)},
    {0: (4,), 1: (2, 2), 2: (1, 1, 1), 3: (1, 2, 0, 1), 4: (0, 1, 1, 1, 1)},
)
FEW = {0: (5,), 1: (2, 3), 2: (2, 1, 2), 3: (1, 1, 1, 2), 4: (1, 1, 1, 1, 1)}
HOSTED = (66, 120, 65, 9)
SCRIPTS = {
    0: (
        Outcome(0, rank=3),
        Outcome(1, rank=0),
        Outcome(ALL, rank=1),
        Outcome(ALL, rank=2),
        Outcome(2, drafted=4),
        Outcome(0, rank=0, limit=1),
        Outcome(ALL, rank=3),
        Outcome(0, hosted=HOSTED[:2]),
        Outcome(1, rank=2),
    ),
    1: (
        Outcome(0, drafted=1),
        Outcome(1, rank=5),
        Outcome(0, rank=2),
        Outcome(ALL, hosted=HOSTED),
        Outcome(3, rank=1),
        Outcome(1),
        Outcome(0, rank=6),
        Outcome(3, drafted=3),
        Outcome(2, rank=1, limit=1),
    ),
    2: (
        Outcome(0, hosted=HOSTED[:1]),
        Outcome(0, rank=1),
        None,  # nobody uses the slot
        SECOND,
        Outcome(0, rank=2, limit=2),
        Outcome(ALL, rank=0),
        Outcome(1, hosted=HOSTED[:3]),
        Outcome(3, rank=0),
        Outcome(1),
    ),
}
"""Rounds after the first one, in which every slot is opened."""
OF_ONE_TOKEN = {
    0: (
        Outcome(0, rank=3),
        Outcome(ALL, rank=1),
        Outcome(0, drafted=1),
        Outcome(1, rank=0),
        Outcome(ALL, rank=2),
        Outcome(0, hosted=HOSTED[:1]),
        Outcome(1, rank=1),
    ),
    1: (
        Outcome(0, drafted=1),
        Outcome(1, rank=3),
        Outcome(0),
        Outcome(0, rank=6),
        Outcome(ALL, hosted=HOSTED[:1]),
        Outcome(0, rank=2),
        Outcome(ALL, rank=0),
    ),
    2: (
        Outcome(0, rank=2),
        Outcome(ALL, rank=0),
        None,
        SECOND,
        Outcome(0, hosted=HOSTED[:1]),
        Outcome(1, rank=2),
        Outcome(ALL, rank=1, limit=0),
    ),
}
"""The same for K = 1."""


@dataclasses.dataclass(frozen=True)
class Draft:
    """Programs that count their forwards in `ran`, and the same model without them."""

    menu: tuple[ExpansionPrograms, ...]
    weights: list[jax.Array]
    plain: Plain
    ran: list[int]
    c: float

    def rounds(self, *, longer=False, fan_out=lambda slot, length: FAN_OUTS[slot][length]):
        return Rounds(
            branch_draft.BranchDraft(self.menu, self.weights),
            fan_out,
            forwards=self.menu[0].base.drafting.k + longer,
            lowered=LOWERED,
            ran=self.ran,
        )

    def of_two_budgets(self):
        """Rounds whose budgets take turns."""
        rounds = self.rounds(
            fan_out=lambda slot, length: (FEW if len(rounds.seen) % 2 else FAN_OUTS[slot])[length]
        )
        return rounds


def compiled(
    path: Path,
    *,
    there: Mapping[str, Any] = {},
    c: float = 1.0,
    quickly: bool = True,
    fewer: tuple[int, ...] = (),
    **drafted,
) -> Draft:
    """A checkpoint's draft.

    Args:
      there: fields of `Execution`, as on an accelerator.
      fewer: smaller numbers of branches to have programs for, too.
      quickly: without the compiler's optimisations, which take longer than all rounds.
      drafted: fields of `Drafting`.
    """
    checkpoint = open_checkpoint(str(path))
    execution = dataclasses.replace(FLOAT32, prefill_chunks=(32,))
    execution = dataclasses.replace(execution, **there)
    model = FunctionalModel(checkpoint.config, execution)
    settings = {"k": K, "support": SUPPORT, "rule": "ratio", "branches": M, "saguaro_c": c}
    drafting = Drafting(**(settings | drafted))
    ran: list[int] = []
    hidden = CausalLM.hidden

    def counted(self, tokens, *rest):
        jax.debug.callback(lambda: ran.append(tokens.shape[1]))
        return hidden(self, tokens, *rest)

    def compile_quickly(job: ProgramSpec, _mesh: None, _devices):
        jitted = jax.jit(job.function, donate_argnums=job.donate, compiler_options=QUICKLY)
        return jitted.lower(*job.arguments).compile(), None

    elsewhere = jax.lax.platform_dependent

    def in_blocks(*blocks, tpu=None, **others):
        return elsewhere(*blocks, **others) if tpu is None else tpu(*blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalLM, "hidden", counted)
        if there.get("window_writes"):  # a TPU's
            patch.setattr(rows, "_MAX_BLOCK_ROWS", drafting.branches)
            patch.setattr(jax.lax, "platform_dependent", in_blocks)
        if quickly:
            patch.setattr(ProgramSpec, "_compile_or_load", compile_quickly)
        base = DraftPrograms(
            model, slots=SLOTS, context=CONTEXT, tokens=tiny.TOKENS, drafting=drafting
        )
        menu = ExpansionPrograms.menu(base, (*fewer, drafting.branches))
    return Draft(menu, parameters(checkpoint, model), Plain(checkpoint), ran, c)


def scripted(rounds: Rounds, slots: Iterable[int] = range(SLOTS), script=None) -> list[Seen]:
    """Every slot goes through its script."""
    rounds.run({slot: REQUESTS[slot] for slot in slots})
    scripts = script or SCRIPTS
    for index in range(len(scripts[0])):
        moves = {slot: scripts[slot][index] for slot in slots}
        rounds.run({slot: move for slot, move in moves.items() if move is not None})
    return rounds.seen


def length(seen: Seen, slot: int) -> int:
    return int(seen.followed.proposal.length[slot])


def record(seen: Seen, slot: int) -> Speculation:
    request, drawn = seen.requests[slot], seen.sources[slot] in ("hit", "draft")
    return Speculation.of(seen.followed, slot, request, slot, seen.texts[slot], drawn=drawn)


def branches(seen: Seen, slot: int) -> list[tuple[int, int, Speculation]]:
    """(k, rank, branch) of those that are prepared."""
    found = []
    proposed = record(seen, slot).tokens
    for number, k, rank in seen.branches(slot):
        text = (*seen.texts[slot], *proposed[:k], int(seen.on_host.bonus[slot, number]))
        row = slot * seen.budget + number
        one = Speculation.of(seen.expansion.records, row, seen.requests[slot], slot, text)
        found.append((k, rank, one))
    return found
