"""Programs that take prompt tokens; see `PagedPrograms` for what they are given and return."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ssd_jax.devices import passes
from ssd_jax.devices.passes import PagedPrograms
from ssd_jax.devices.program_spec import Name, ProgramSpec, ints
from ssd_jax.kernels.kv_pages import Contiguous
from ssd_jax.sampling import penalties

_TOLD = ("tokens", "where")


def prompt_specs(programs: PagedPrograms, *, with_logits: bool) -> dict[Name, ProgramSpec]:
    """`prefill` of every width; `remember` and `recall` where slots share pages."""
    widths = programs.model.execution.prefill_chunks
    specs: dict[Name, ProgramSpec] = {
        ("prefill", width): _prefill(programs, width, with_logits) for width in widths
    }
    if programs.paging is not None:
        specs["remember", max(widths)] = _noted(programs, max(widths), output=False)
        specs["recall", max(widths)] = _noted(programs, max(widths), output=True)
    return specs


def _prefill(programs: PagedPrograms, width: int, with_logits: bool) -> ProgramSpec:
    model, vocab = programs.model, programs.model.config.vocab_size

    def prefill(parameters, pages, history, table, tokens, where):
        slot, offset, count = where
        slot, owner = programs.own(slot)
        index = jnp.arange(width)[None]
        real = (index < count) & owner
        positions = jnp.where(real, offset + index, programs.capacity)
        visible = jnp.where(real, positions + 1, 0)
        module = model.module(parameters)
        own = Contiguous(slot) if table is None else jax.lax.dynamic_slice_in_dim(table, slot, 1)
        hidden, pages, _ = module.hidden(tokens, positions, visible, pages, own)
        history = penalties.add_prompt(
            history, slot, jnp.where(real, tokens, vocab)[0], (offset == 0) & owner
        )
        if not with_logits:
            return pages, history, None
        last = jax.lax.dynamic_slice_in_dim(hidden[0], count - 1, 1)
        return pages, history, programs.of_owner(passes.logits(model, parameters, last), owner)

    structs = programs.structs | {"tokens": ints(1, width), "where": ints(3)}
    kept = ("pages", "history")
    results = (*kept, "logits" if with_logits else "whole")
    return programs.spec(prefill, structs, kept, results, told=_TOLD)


def _noted(programs: PagedPrograms, width: int, *, output: bool) -> ProgramSpec:
    """`recall`, of output, or `remember`."""
    vocab = programs.model.config.vocab_size

    def note(history, tokens, where):
        slot, offset, count = where
        slot, owner = programs.own(slot)
        real = (jnp.arange(width) < count) & owner
        if output:
            return (penalties.recall_output(history, slot, jnp.where(real, tokens[0], -1)),)
        told = jnp.where(real, tokens[0], vocab)
        return (penalties.add_prompt(history, slot, told, (offset == 0) & owner),)

    structs = programs.structs | {"tokens": ints(1, width), "where": ints(3)}
    return programs.spec(note, structs, ("history",), ("history",), told=_TOLD)
