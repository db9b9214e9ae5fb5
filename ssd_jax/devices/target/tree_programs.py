"""Specifications of the target's programs for trees of proposed tokens.

With m nodes of depth K or less:
`forward_tree`: (parameters, pages, table, pending [B], tokens [B, m], parents [B, m], lengths [B])
-> logits [B * (m + 1), V], pages, branches. The pending token's key and value go to the pages,
those of the nodes, of which several have the same position, to `branches`.
`accept_tree`: as `accept`, with parents, branches, pages and table -> outcome [rows, K + 3] int32
(k, the emitted tokens, the row of the last accepted node), bonus, history, pages, path [rows,
K + 1]. It moves keys and values of the accepted path into the pages, so that nothing else has to
know of trees. `path` has the rows whose logits gave the emitted tokens.
`law_tree`: as `law` of `logprob_programs`, with parents. `path_logits`: (logits, path) -> logits
[B * (K + 1), V] of these rows, for reports.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ssd_jax.devices.programs import passes, program_spec
from ssd_jax.devices.programs.first_rows import over_first_rows
from ssd_jax.devices.programs.program_spec import Name, ProgramSpec
from ssd_jax.devices.target.base import TargetBase
from ssd_jax.models.token_tree import Tree
from ssd_jax.sampling import topology
from ssd_jax.sampling.settings import greedy_where_idle
from ssd_jax.sampling.variants import VARIANTS, variant_name
from ssd_jax.sampling.verification import commit, emitted_tokens, target_probs, verify

_PASSED = ("logits", "branches")  # from `forward_tree` to `accept_tree`


def specs(programs: TargetBase) -> dict[Name, ProgramSpec]:
    """All but the reports of log-probabilities."""
    by_name: dict[Name, ProgramSpec] = {("path_logits",): path_logits_spec(programs)}
    for reach in programs.reaches:
        forward = programs.with_reach(("forward_tree",), reach)
        by_name[forward] = forward_spec(programs, reach)
    for variant in programs.variants(programs.slots):
        by_name[variant_name(("accept_tree",), variant)] = accept_spec(programs, variant)
    return by_name


def batch_specs(programs: TargetBase, part: TargetBase) -> dict[Name, ProgramSpec]:
    """The same for a batch size.

    Args:
      part: of the batch size.
    """
    by_name: dict[Name, ProgramSpec] = {}
    size = part.local_slots
    for reach in programs.reaches:
        name = programs.batch_name(programs.with_reach(("forward_tree",), reach), size)
        of_all, of_first = (forward_spec(of, reach) for of in (programs, part))
        by_name[name] = over_first_rows(of_all, of_first, passed=_PASSED)
    for variant in programs.variants(programs.slots):
        name = variant_name(programs.batch_name(("accept_tree",), size), variant)
        of_all, of_first = (accept_spec(of, variant) for of in (programs, part))
        by_name[name] = over_first_rows(of_all, of_first, passed=_PASSED)
    return by_name


def structs(programs: TargetBase, *, masked: bool = False) -> dict[str, Any]:
    """Structs of the programs' arguments, by name; see `TargetBase.accept_structs`."""
    model, slots, nodes = programs.model, programs.slots, programs.verification.nodes
    depth = programs.verification.widths[-1]
    rows = {
        "drafted": jax.eval_shape(programs.blank_tree),
        "tokens": program_spec.ints(slots, nodes),
        "parents": program_spec.ints(slots, nodes),
        "pending": program_spec.ints(slots),
        "lengths": program_spec.ints(slots),
        "path": program_spec.ints(slots, depth + 1),
    }
    return {
        **programs.accept_structs(slots, nodes, masked=masked),
        **programs.by_slots(rows),
        "branches": model.branch_struct(slots, nodes, 1),
    }


def forward_spec(programs: TargetBase, reach: int) -> ProgramSpec:
    """`forward_tree`; positions from `reach` on are not read."""
    model, nodes, size = programs.model, programs.verification.nodes, programs.capacity

    def forward(parameters, pages, table, pending, tokens, parents, lengths):
        tokens = jnp.concatenate([pending[:, None], tokens], axis=1)
        path = topology.paths(parents)
        start = lengths[:, None]
        is_root = jnp.arange(nodes + 1) == 0
        # Idle rows see nothing and are not written.
        positions = jnp.where(start < 0, size, start + topology.depth_of(path))
        struct = model.branch_struct(programs.local_slots, nodes, 1)
        branches = jnp.zeros(struct.shape, struct.dtype)
        tree = Tree(
            branches,
            jnp.stack([jnp.zeros_like(path), jnp.where(start < 0, 0, path)], axis=-1),
            jnp.where(is_root, positions, size),
        )
        visible = jnp.broadcast_to(jnp.clip(start + 1, 0, size), path.shape)
        hidden, pages, branches = model.module(parameters).hidden(
            tokens, positions, visible, pages, programs.table(table, reach), tree
        )
        logits = passes.logits(model, parameters, hidden)
        return logits.reshape(-1, logits.shape[-1]), pages, branches

    return programs.spec(
        forward,
        structs(programs),
        ("pages",),
        ("logits", "pages", "branches"),
        host_args=("lengths",),
        host_or_device_args=("pending", "tokens", "parents"),
    )


def accept_spec(programs: TargetBase, variant: str, *, masked: bool = False) -> ProgramSpec:
    """`accept_tree` of all slots."""
    model, verification = programs.model, programs.verification
    vocab, nodes, depth = model.config.vocab_size, verification.nodes, verification.widths[-1]
    common = {"tokens": programs.ids, "parts": VARIANTS[variant], "rule": verification.rule}
    common["backend"] = model.execution.verify

    def accept(
        logits, drafted, parents, branches, pages, table, sampling, start, history, masks=None
    ):
        live = start >= 0
        outcome = verify(
            logits.reshape(-1, nodes + 1, vocab),
            drafted,
            greedy_where_idle(sampling, live),
            start,
            history,
            parents=parents,
            masks=masks,
            **common,
        )
        if VARIANTS[variant].adjusted is not False:
            history = commit(history, drafted, outcome, live)
        path = topology.rows_of(outcome.path, depth, nodes)
        place = jnp.arange(depth)
        is_accepted = live[:, None] & (place < outcome.accepted[:, None])
        pages = passes.promote(
            model,
            pages,
            programs.table(table),
            branches,
            jnp.zeros_like(start),
            jnp.where(is_accepted, start[:, None] + 1 + place, programs.capacity),
            entries=jnp.maximum(path[:, 1:] - 1, 0),
        )
        emitted = emitted_tokens(drafted, outcome, depth)
        last = jnp.max(path, axis=1, keepdims=True)
        packed = jnp.concatenate([outcome.accepted[:, None], emitted, last], axis=1)
        return packed, outcome.bonus, history, pages, path

    return programs.spec(
        accept,
        structs(programs, masked=masked),
        ("history", "pages"),
        ("read", "slots", "history", "pages", "slots"),
        host_args=("start",),
    )


def path_logits_spec(programs: TargetBase) -> ProgramSpec:
    """`path_logits`."""
    nodes, depth = programs.verification.nodes, programs.verification.widths[-1]

    def path_logits(logits, path):
        by_row = logits.reshape(-1, nodes + 1, logits.shape[-1])
        along = jnp.take_along_axis(by_row, path[:, :, None], axis=1)
        return (along.reshape(-1, logits.shape[-1]),)

    shapes = {"path_logits": programs.logits_of(depth)}
    return programs.spec(path_logits, structs(programs) | shapes, (), ("path_logits",))


def law_spec(programs: TargetBase, variant: str, *, masked: bool = False) -> ProgramSpec:
    """`law_tree` of all slots."""
    vocab, nodes = programs.model.config.vocab_size, programs.verification.nodes

    def law(logits, drafted, parents, sampling, start, history, masks=None):
        p = target_probs(
            logits.reshape(-1, nodes + 1, vocab),
            drafted,
            greedy_where_idle(sampling, start >= 0),
            start,
            history,
            tokens=programs.ids,
            parts=VARIANTS[variant],
            parents=parents,
            masks=masks,
            backend=programs.model.execution.verify,
        )
        return (jnp.log(p).reshape(-1, vocab),)

    arguments = structs(programs, masked=masked)
    return programs.spec(law, arguments, (), ("logits",), host_args=("start",))
