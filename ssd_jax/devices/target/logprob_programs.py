"""Programs that report log-probabilities, for requests that ask for them.

They run beside `accept` and behind `prefill`, whose results they only read, so that no request's
text depends on them, and no other request pays for them:

`logprobs`: (logits or law [rows * (w + 1), V], outcome [rows, w + 2]) -> `Logprobs` of the emitted
tokens. `law`, where log-probabilities are processed: (as `accept`) -> log p [rows * (w + 1), V];
it runs before `accept`, which changes the history, in the same variant, so that p has the same
bits. `prompt_logprobs`: (parameters, hidden states of a chunk, tokens [1, R], origin [slot, first])
-> `Logprobs` [1, R] of R tokens, each behind a position of the chunk, from position `first` on.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from ssd_jax.devices.programs import passes, program_spec
from ssd_jax.devices.programs.first_rows import over_first_rows
from ssd_jax.devices.programs.program_spec import Name, ProgramSpec
from ssd_jax.devices.target.programs import Programs
from ssd_jax.devices.target.tree_programs import law_spec as tree_law_spec
from ssd_jax.devices.target.tree_programs import path_logits_spec
from ssd_jax.models.sharding import DATA_AXIS, spans_processes
from ssd_jax.sampling import proposal
from ssd_jax.sampling.logprobs import log_softmax, logprobs
from ssd_jax.sampling.params import MAX_LOGPROBS, Report
from ssd_jax.sampling.settings import greedy_where_idle
from ssd_jax.sampling.variants import ANY, VARIANTS, variant_name
from ssd_jax.sampling.verification import target_probs

_MOST_ROWS = 64
"""Most positions of a prompt whose logits exist at a time."""


def load(programs: Programs, report: Report) -> None:
    """Compiles the programs of a report that are not there yet; see `Programs.add`."""
    if not any(name[0] == report for name in programs.names):
        programs.add(report, _specs(programs, report), _batch_specs)


def _specs(programs: Programs, report: Report) -> dict[Name, ProgramSpec]:
    """All counts of likeliest tokens share them."""
    if report == "prompt_logprobs":
        widths = programs.model.execution.prefill_chunks
        return {(report, width): _prompt_spec(programs, width) for width in widths}
    sizes = [(1, 0), *((programs.slots, width) for width in programs.verification.widths)]
    specs: dict[Name, ProgramSpec] = {(report, *size): _spec(programs, *size) for size in sizes}
    if programs.verification.logprobs_of == "processed":
        for size in sizes:
            for variant in programs.variants(size[0]):
                specs[variant_name(("law", *size), variant)] = law_spec(programs, *size, variant)
        if programs.verification.nodes:
            for variant in programs.variants(programs.slots):
                specs[variant_name(("law_tree",), variant)] = tree_law_spec(programs, variant)
    return specs


def _batch_specs(programs: Programs, part: Programs, task: int | str) -> dict[Name, ProgramSpec]:
    is_tree, size, slots = isinstance(task, str), part.local_slots, programs.slots
    proposed = programs.verification.widths[-1] if is_tree else int(task)
    specs: dict[Name, ProgramSpec] = {}

    def add(name: Name, of_all: ProgramSpec, of_first: ProgramSpec, variant: str = ANY) -> None:
        passed = ["logits", "path_logits"]
        full_name = variant_name(programs.batch_name(name, size), variant)
        specs[full_name] = over_first_rows(of_all, of_first, passed=passed)

    of_all, of_first = (_spec(of, of.slots, proposed) for of in (programs, part))
    add(("logprobs", slots, proposed), of_all, of_first)
    if is_tree:
        add(("path_logits",), path_logits_spec(programs), path_logits_spec(part))
    if programs.verification.logprobs_of == "processed":
        for variant in programs.variants(slots):
            if is_tree:
                law = partial(tree_law_spec, variant=variant)
                add(("law_tree",), law(programs), law(part), variant)
            else:
                of_all, of_first = (
                    law_spec(of, of.slots, proposed, variant) for of in (programs, part)
                )
                add(("law", slots, proposed), of_all, of_first, variant)
    return specs


def rows(width: int) -> int:
    """Positions of a chunk of a prompt that one program reports."""
    return math.gcd(width, _MOST_ROWS)


def _spec(programs: Programs, count: int, proposed: int) -> ProgramSpec:
    model, all_slots = programs.model, count == programs.slots
    vocab, raw = model.config.vocab_size, programs.verification.logprobs_of == "raw"
    outcome = program_spec.ints(count, proposed + 2)
    shared = spans_processes(model.mesh)  # each device has the outcomes of all slots then
    if all_slots and not shared:
        outcome = programs.by_slots(outcome)

    def report(logits, outcome):
        if all_slots and shared and model.data_shards > 1:
            begin = jax.lax.axis_index(DATA_AXIS) * programs.local_slots
            outcome = jax.lax.dynamic_slice_in_dim(outcome, begin, programs.local_slots)
        log_p = logits.reshape(-1, proposed + 1, vocab)
        log_p = _mask_padding(programs, log_softmax(log_p) if raw else log_p)
        return (logprobs(log_p, outcome[:, 1:], _count(programs)),)

    structs = programs.accept_structs(count, proposed) | {"outcome": outcome}
    return programs.spec(report, structs, (), ("read" if all_slots else "whole",))


def law_spec(
    programs: Programs, count: int, proposed: int, variant: str, *, masked: bool = False
) -> ProgramSpec:
    """`law`, of all slots or of one."""
    all_slots, vocab = count == programs.slots, programs.model.config.vocab_size

    def law(logits, drafted, sampling, start, history, slot, masks=None):
        slot, owner = programs.local_slot(slot)
        if not all_slots:
            history = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, slot, 1), history)
        p = target_probs(
            logits.reshape(-1, proposed + 1, vocab),
            proposal.narrow(drafted, proposed),
            greedy_where_idle(sampling, start >= 0),
            start,
            history,
            tokens=programs.ids,
            parts=VARIANTS[variant],
            masks=masks,
            backend=programs.model.execution.verify,
        )
        log_p = jnp.log(p).reshape(-1, vocab)
        return (log_p if all_slots else programs.from_owner(log_p, owner),)

    structs = programs.accept_structs(count, proposed, masked=masked)
    return programs.spec(law, structs, (), ("logits",), host_args=("start", "slot"))


def _prompt_spec(programs: Programs, width: int) -> ProgramSpec:
    model, count = programs.model, rows(width)

    def score(parameters, hidden, tokens, origin):
        slot, first = origin
        _, owner = programs.local_slot(slot)
        hidden = jax.lax.dynamic_slice_in_dim(hidden, first, count, axis=1)
        log_p = _mask_padding(programs, log_softmax(passes.logits(model, parameters, hidden)))
        return (programs.from_owner(logprobs(log_p, tokens, _count(programs)), owner),)

    shape = model.data_shards, width, model.config.hidden_size
    structs = programs.structs | {
        "hidden": programs.by_slots(jax.ShapeDtypeStruct(shape, jnp.float32)),
        "tokens": program_spec.ints(1, count),
        "origin": program_spec.ints(2),
    }
    return programs.spec(score, structs, (), ("whole",), host_args=("tokens", "origin"))


def _count(programs: Programs) -> int:
    return min(MAX_LOGPROBS, programs.model.config.vocab_size)


def _mask_padding(programs: Programs, log_p: Float32[Array, "B W V"]) -> Float32[Array, "B W V"]:
    """Without vocabulary padding, whose rows of the head stand for no token."""
    return jnp.where(jnp.arange(log_p.shape[-1]) < programs.ids, log_p, -jnp.inf)
