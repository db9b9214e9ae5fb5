"""The outcomes that branches are prepared for are the likeliest ones that are not in the tree."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.devices.trees import outcomes as tree_outcomes
from ssd_jax.devices.trees import record as tree_record
from ssd_jax.devices.trees.record import TreeRecord
from ssd_jax.roles.drafting import GAP_CLASSES
from ssd_jax.sampling.confidence import EDGES, UNKNOWN
from tests.sampling.edits import Edit, edited
from tests.sampling.trees import path_of, random_parents

SLOTS, NODES, DEPTH, RANKS, M, VOCAB = 6, 7, 7, 5, 8, 40


def random_record(seed):
    """Trees whose nodes are mostly continuations that the draft ranked; some are no nodes."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, SLOTS, NODES)
    candidates = np.stack(
        [[rng.permutation(VOCAB)[:RANKS] for _ in range(NODES + 1)] for _ in range(SLOTS)]
    ).astype(np.int32)
    candidates[rng.random(candidates.shape) < 0.1] = -1
    tokens = np.zeros((SLOTS, NODES), np.int32)
    for slot in range(SLOTS):
        taken = {}
        for node, parent in enumerate(parents[slot].tolist()):
            rank = taken.setdefault(parent, int(rng.integers(0, 2)))
            taken[parent] += 1
            token = candidates[slot, parent, min(rank, RANKS - 1)]
            tokens[slot, node] = token if token >= 0 and rank < RANKS else VOCAB + node
    length = rng.integers(NODES - 3, NODES + 1, SLOTS).astype(np.int32)
    start = np.where(np.arange(SLOTS) == 2, -1, 30).astype(np.int32)  # one slot is idle
    classes = rng.integers(0, GAP_CLASSES, (SLOTS, NODES + 1)).astype(np.int32)
    q_classes = rng.integers(UNKNOWN, len(EDGES) + 1, (SLOTS, NODES)).astype(np.int32)
    everywhere = np.ones((SLOTS, NODES + 1), bool)
    arrays = start, start, tokens, parents, length, everywhere, candidates, classes, q_classes
    return TreeRecord(*map(jnp.asarray, arrays))


def searched(record, slot, log_rates, counts):
    """Outcome (row, t*, rank) -> score, over all paths one by one."""
    tokens, parents = np.asarray(record.tokens)[slot], np.asarray(record.parents)[slot]
    candidates, classes = np.asarray(record.candidates)[slot], np.asarray(record.gap_class)[slot]
    length, found = int(record.length[slot]), {}
    if record.start[slot] < 0:
        return found
    for row in range(length + 1):
        score, at = np.float32(0), 0
        path = path_of(parents, row)
        for depth, node in enumerate(path):
            ranks = candidates[at].tolist()
            rank = ranks.index(tokens[node]) if tokens[node] in ranks else RANKS - 1
            score, at = score + log_rates[slot, depth, classes[at], rank], node + 1
        if not counts[slot, len(path)]:
            continue
        children = [tokens[node] for node in range(length) if parents[node] == row]
        for rank, token in enumerate(candidates[row].tolist()):
            if token >= 0 and token not in children:
                rate = log_rates[slot, len(path), classes[row], rank]
                found[row, token, rank] = score + rate
    return found


def check(seed, share=(0, 1)):
    number, parts = share
    rng = np.random.default_rng([seed, 1])
    record = random_record(seed)
    log_rates = -rng.exponential(1.0, (SLOTS, DEPTH + 1, GAP_CLASSES, RANKS)).astype(np.float32)
    counts = np.full((SLOTS, DEPTH + 1), M, np.int32)
    counts[1, 2:], counts[3] = 0, [M - 3] * (DEPTH + 1)  # little room; a smaller budget

    @jax.jit
    def choose(record, log_rates, counts, share):
        of_rows = tree_outcomes.log_rates_of(record, log_rates)
        return tree_outcomes.likeliest_outcomes(record, of_rows, counts, share, M)

    outcomes = choose(record, jnp.asarray(log_rates), jnp.asarray(counts), share)
    rows, bonus, ranks = map(np.asarray, outcomes)
    for slot in range(SLOTS):
        all_outcomes = searched(record, slot, log_rates, counts)
        wanted = {
            (row, token, rank): score
            for (row, token, rank), score in all_outcomes.items()
            if (row + rank) % parts == number
        }
        best = sorted(wanted, key=lambda outcome: -wanted[outcome])[: counts[slot].max()]
        count = len(best)
        chosen = [*zip(rows[slot], bonus[slot], ranks[slot], strict=True)]
        assert chosen[:count] == best
        assert chosen[count:] == [(-1, -1, -1)] * (M - count)


@pytest.mark.parametrize("seed", range(6))
def test_outcomes_are_the_likeliest_continuations_outside_the_tree(seed):
    check(seed)


@pytest.mark.parametrize("share", [(0, 2), (1, 2), (2, 3)])
def test_a_draft_that_shares_outcomes_has_the_likeliest_of_its_own(share):
    check(0, share)


def test_a_draft_that_takes_the_outcomes_of_others_is_caught():
    edit = Edit(tree_outcomes, "likeliest_outcomes", "% parts == number", "% parts >= 0")
    with edited([edit]), pytest.raises(AssertionError):
        check(0, (0, 2))


FLAWS = {
    "children are outcomes, too": ("usable &= ~is_child.any(axis=3)", "pass"),
    "rates of the first depth": ("log_rates[slot, depth,", "log_rates[slot, 0 * depth,"),
    "rates along the path left out": ("score[:, :, None] + log_rates", "log_rates"),
    "no room is no matter": ("(record.exists & has_room)", "record.exists"),
    "nodes that are none": ("record.exists[:, None, 1:]", "True"),
    "rates of the node in place of its parent's": (
        "log_rates, record.parents[:, :, None], axis=1",
        "log_rates, record.parents[:, :, None] + 1, axis=1",
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_planted_flaws_of_the_choice_are_caught(flaw):
    function = {
        "nodes that are none": tree_record.are_children,
        "rates of the first depth": tree_outcomes.log_rates_of,
    }.get(flaw, tree_outcomes.likeliest_outcomes)
    edit = Edit(sys.modules[function.__module__], function.__name__, *FLAWS[flaw])
    with edited([edit]), pytest.raises(AssertionError):  # noqa: PT012 (any of the seeds)
        for seed in range(6):
            check(seed)
