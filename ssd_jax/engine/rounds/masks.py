"""The masks of a round, by the grammars of its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ssd_jax.engine.requests.state import RequestState
from ssd_jax.roles.protocols import Target
from ssd_jax.roles.records import Drafted, Masks, ProposedTokens
from ssd_jax.sampling.masks import ANY_TOKEN


def round_masks(
    rows: Iterable[tuple[int, RequestState]],
    slots: int,
    target: Target,
    drafted: Drafted | None,
    fail: Callable[[RequestState, Exception], None],
) -> Masks | None:
    """Masks of a round; None if no request in it has a grammar.

    Args:
      rows: requests by slot, of so many.
      target: has run the proposal.
      drafted: what the round verifies; None without a proposal.
      fail: ends a request whose grammar has grown too complex.
    """
    with_grammar = [row for row in rows if row[1].sequence.grammar is not None]
    proposed: ProposedTokens | None = None
    by_slot: dict[int, np.ndarray] = {}
    for slot, state in with_grammar:
        tokens, parents, depth = [], None, 0
        if drafted is not None and drafted.lengths[slot]:
            depth = int(drafted.lengths[slot])
            proposed = target.read_tokens(drafted) if proposed is None else proposed
            tokens = proposed.tokens[slot].tolist()
            if proposed.parents is None:
                tokens = tokens[:depth]
            else:
                parents = proposed.parents[slot].tolist()
        grammar = state.sequence.grammar
        assert grammar is not None
        try:
            by_slot[slot] = grammar.masks(state.sequence.output, tokens, parents, depth)
        except Exception as error:
            fail(state, error)
    if not by_slot:
        return None
    size = max(map(len, by_slot.values())), next(iter(by_slot.values())).shape[1]
    masks = np.full((slots, *size), ANY_TOKEN, np.int32)
    for slot, of_row in by_slot.items():
        masks[slot, : len(of_row)] = of_row
    return masks
