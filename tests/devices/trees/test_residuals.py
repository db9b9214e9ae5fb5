"""Behind a sampled row come its children, then the tokens that are expected to follow no child."""

import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.devices.trees import residuals
from tests.devices.trees.test_outcomes import NODES, RANKS, SLOTS, VOCAB, random_record
from tests.sampling.edits import Edit, edited


def children_of(record, slot, row):
    """The nodes that are the children of a row."""
    length = int(record.length[slot]) if record.start[slot] >= 0 else 0
    return [node for node in range(length) if record.parents[slot, node] == row]


def listed(record, bonus, slot, row):
    """The continuations of a row, one by one."""
    tokens = np.asarray(record.tokens)[slot]
    children = [int(tokens[node]) for node in children_of(record, slot, row)]
    others = [token for token in bonus[slot, row].tolist() if token >= 0 and token not in children]
    found = [*children, *others][:RANKS]
    return [*found, *[-1] * (RANKS - len(found))]


def check(seed):
    record, rng = random_record(seed), np.random.default_rng([seed, 2])
    bonus = np.stack(
        [[rng.permutation(VOCAB)[:RANKS] for _ in range(NODES + 1)] for _ in range(SLOTS)]
    ).astype(np.int32)
    bonus[:, :, 0] = np.asarray(record.tokens)[:, [0]]  # often a child
    bonus[rng.random(bonus.shape) < 0.1] = -1
    found = np.asarray(residuals.continuations(record, jnp.asarray(bonus)))
    for slot in range(SLOTS):
        for row in range(NODES + 1):
            assert found[slot, row].tolist() == listed(record, bonus, slot, row)


@pytest.mark.parametrize("seed", range(4))
def test_children_come_first_and_then_what_else_is_expected(seed):
    check(seed)


FLAWS = {
    "children among the bonus tokens": ("(bonus >= 0) & ~is_taken.any(axis=3)", "bonus >= 0"),
    "bonus tokens in the places of children": (
        "_at_places(bonus, is_other, children, ranks)",
        "_at_places(bonus, is_other, 0 * children, ranks)",
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_planted_flaws_of_the_lists_are_caught(flaw):
    edit = Edit(residuals, "continuations", *FLAWS[flaw])
    with edited([edit]), pytest.raises(AssertionError):  # noqa: PT012 (any of the seeds)
        for seed in range(4):
            check(seed)


def expected_rates(record, predict, slot, row):
    """The rates of a row's continuations, one by one."""
    rates, reached = [], 1.0
    nodes = children_of(record, slot, row)
    for place, node in enumerate(nodes[:RANKS]):
        accepted = residuals._ACCEPTED[int(record.q_class[slot, node])][place]
        rates.append(reached * accepted)
        reached *= 1 - accepted
    shares = (residuals._OF_RESIDUALS if nodes else residuals._OF_LEAVES)[predict]
    return [*rates, *(reached * share for share in shares)][:RANKS]


def check_rates(seed, predict):
    record = random_record(seed)
    found = np.asarray(residuals.outcome_rates(record, predict))
    for slot in range(SLOTS):
        for row in range(NODES + 1):
            rates = expected_rates(record, predict, slot, row)
            np.testing.assert_allclose(found[slot, row], rates, rtol=1e-5)


@pytest.mark.parametrize("predict", ["plain", "noise"])
def test_a_row_goes_on_by_a_child_by_the_class_of_its_q_or_by_what_is_left(predict):
    check_rates(0, predict)


RATE_FLAWS = {
    "children by the order of all nodes": ("_places(is_child)", "jnp.cumsum(is_child, axis=2)"),
    "children that do not wait for each other": ("before * accepted", "accepted"),
    "bonus tokens of leaves everywhere": ("(children > 0).astype(int)", "(0 * children)"),
    "classes of other nodes": ("record.q_class[:, None]", "record.q_class[:, None, ::-1]"),
}


@pytest.mark.parametrize("flaw", RATE_FLAWS)
def test_planted_flaws_of_the_rates_are_caught(flaw):
    edit = Edit(residuals, "outcome_rates", *RATE_FLAWS[flaw])
    with edited([edit]), pytest.raises(AssertionError):
        check_rates(0, "noise")


def test_rates_of_a_row_are_a_distribution_that_favours_surer_children():
    accepted = np.array(residuals._ACCEPTED)
    assert ((accepted > 0) & (accepted < 1)).all()
    assert (np.diff(accepted[:-1, 0]) > 0).all()
    for shares in (*residuals._OF_LEAVES.values(), *residuals._OF_RESIDUALS.values()):
        assert sum(shares) < 1
        assert (np.diff(shares) <= 0).all()
