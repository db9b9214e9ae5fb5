"""Behind a sampled row come its children, then the tokens that are expected to follow no child."""

import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.devices import tree_residuals
from ssd_jax.roles.drafting import TreeShape
from ssd_jax.speculation.fixed_rates import fixed_rates
from tests.devices.test_tree_outcomes import NODES, RANKS, SLOTS, VOCAB, random_record
from tests.sampling.edits import Edit, edited

SHAPE = TreeShape(nodes=NODES, depth=4, ancestors=4)


def listed(record, bonus, slot, row):
    """The continuations of a row, one by one, and the number of its children."""
    parents, tokens = np.asarray(record.parents)[slot], np.asarray(record.tokens)[slot]
    length = int(record.length[slot]) if record.start[slot] >= 0 else 0
    children = [int(tokens[node]) for node in range(length) if parents[node] == row]
    others = [token for token in bonus[slot, row].tolist() if token >= 0 and token not in children]
    found = [*children, *others][:RANKS]
    return [*found, *[-1] * (RANKS - len(found))], len(children)


def check(seed):
    record, rng = random_record(seed), np.random.default_rng([seed, 2])
    bonus = np.stack(
        [[rng.permutation(VOCAB)[:RANKS] for _ in range(NODES + 1)] for _ in range(SLOTS)]
    ).astype(np.int32)
    bonus[:, :, 0] = np.asarray(record.tokens)[:, [0]]  # often a child
    bonus[rng.random(bonus.shape) < 0.1] = -1
    found = tree_residuals.continuations(record, jnp.asarray(bonus))
    tokens = np.asarray(found.tokens).reshape(bonus.shape)
    classes = np.asarray(found.gap_class).reshape(bonus.shape[:2])
    for slot in range(SLOTS):
        for row in range(NODES + 1):
            expected, children = listed(record, bonus, slot, row)
            assert tokens[slot, row].tolist() == expected
            assert classes[slot, row] == children


@pytest.mark.parametrize("seed", range(4))
def test_children_come_first_and_then_what_else_is_expected(seed):
    check(seed)


FLAWS = {
    "children among the bonus tokens": ("(bonus >= 0) & ~is_taken.any(axis=3)", "bonus >= 0"),
    "bonus tokens in the places of children": (
        "_at_places(bonus, is_other, children, ranks)",
        "_at_places(bonus, is_other, 0 * children, ranks)",
    ),
    "as many children everywhere": ("jnp.minimum(children, ", "jnp.minimum(0 * children + 1, "),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_planted_flaws_of_the_lists_are_caught(flaw):
    edit = Edit(tree_residuals, "continuations", *FLAWS[flaw])
    with edited([edit]), pytest.raises(AssertionError):  # noqa: PT012 (any of the seeds)
        for seed in range(4):
            check(seed)


@pytest.mark.parametrize("predict", ["plain", "noise"])
def test_rates_of_a_row_are_those_of_its_children_then_shares_of_what_is_left(predict):
    rates = tree_residuals.outcome_rates(SHAPE, predict)
    accepted = fixed_rates(SHAPE, trees=True)[0, 0]
    for children in range(SHAPE.ranks):
        row = rates[0, children]
        assert row[:children].tolist() == accepted[:children].tolist()
        assert 0 < row[children:].sum() < 1 - accepted[:children].sum()
        assert (np.diff(row[children:]) <= 0).all()
    assert (rates == rates[0]).all()
