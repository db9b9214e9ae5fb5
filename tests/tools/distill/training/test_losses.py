"""Losses and their gradients against NumPy in float64, written the plain way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.tools.distill.training import losses
from ssd_jax.tools.distill.training.losses import Weights, from_all, from_top
from tests.sampling.edits import Edit, edited

POSITIONS, COLUMNS, TOP = 7, 12, 4
TOP_PROGRAM, ALL_PROGRAM = jax.jit(from_top), jax.jit(from_all)
MIXES = [Weights(1.0, 0.0, 0.0), Weights(0.0, 1.0, 0.0), Weights(0.0, 0.0, 1.0)]
MIXES.append(Weights(0.3, 1.2, 0.5))


def softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class Case:
    """Random positions; ids from COLUMNS on are none of the draft's. One id in `columns` is."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.logits = rng.normal(0, 2, (POSITIONS, COLUMNS))
        order = np.argsort(rng.random((POSITIONS, COLUMNS + 2)), axis=1)
        self.columns = np.minimum(order[:, :TOP], COLUMNS).astype(np.int32)
        p = softmax(rng.normal(0, 2, (POSITIONS, COLUMNS + 2)))
        self.probs = np.take_along_axis(p, order[:, :TOP], axis=1)
        self.target_probs, self.largest = p[:, :COLUMNS], p.max(axis=1).astype(np.float32)
        self.following = np.minimum(order[:, 1], COLUMNS).astype(np.int32)
        self.following[0] = COLUMNS
        self.counted = np.arange(POSITIONS) != 2

    def args(self):
        return self.following, self.counted

    def top(self, weights, function=TOP_PROGRAM):
        logits, probs = (jnp.asarray(x, jnp.float32) for x in (self.logits, self.probs))
        return function(logits, jnp.asarray(self.columns), probs, *self.args(), weights)

    def all(self, weights):
        logits, p = (jnp.asarray(x, jnp.float32) for x in (self.logits, self.target_probs))
        return ALL_PROGRAM(logits, p, jnp.asarray(self.largest), *self.args(), weights)


def plain_top(case, logits):
    """(cross entropy, kl, accepted) of every position, float64, against the top N."""
    q_all, found = softmax(logits), []
    for q, columns, probs, following in zip(
        q_all, case.columns, case.probs, case.following, strict=True
    ):
        inside = [(c, p) for c, p in zip(columns, probs, strict=True) if c < COLUMNS]
        rest, q_rest = 1 - probs.sum(), 1 - sum(q[c] for c, _ in inside)
        kl = sum(p * np.log(p / q[c]) for c, p in inside) + rest * np.log(rest / q_rest)
        entropy = -np.log(q[following]) if following < COLUMNS else 0.0
        found.append((entropy, kl, sum(min(p, q[c]) for c, p in inside)))
    return np.array(found)


def plain_all(case, logits):
    q = softmax(logits)
    entropy = [
        -np.log(row[f]) if f < COLUMNS else 0.0 for row, f in zip(q, case.following, strict=True)
    ]
    kl = (case.target_probs * np.log(case.target_probs / q)).sum(axis=1)
    return np.stack([entropy, kl, np.minimum(case.target_probs, q).sum(axis=1)], axis=1)


def plain_loss(parts, weights):
    return parts[:, 0] * weights[0] + parts[:, 1] * weights[1] + (1 - parts[:, 2]) * weights[2]


def slopes(case, plain, weights, step=1e-5):
    """Gradient of the summed loss by central differences."""
    found = np.zeros_like(case.logits)
    for index in np.ndindex(*case.logits.shape):
        ahead, behind = case.logits.copy(), case.logits.copy()
        ahead[index] += step
        behind[index] -= step
        gain = plain_loss(plain(case, ahead), weights) - plain_loss(plain(case, behind), weights)
        found[index] = gain[case.counted].sum() / (2 * step)
    return found


@pytest.mark.parametrize("weights", MIXES)
@pytest.mark.parametrize("against", ["top", "all"])
def test_losses_and_gradients_are_those_of_numpy(against, weights):
    case = Case()
    plain = {"top": plain_top, "all": plain_all}[against]
    sums, gradient = getattr(case, against)(weights)
    parts = plain(case, case.logits)
    expected = [*parts[case.counted].sum(axis=0)]
    assert [sums.cross_entropy, sums.kl, sums.overlap] == pytest.approx(expected, rel=1e-5)
    total = plain_loss(parts, weights)[case.counted].sum()
    assert float(sums.loss) == pytest.approx(total, rel=1e-5)
    assert float(sums.positions) == POSITIONS - 1
    np.testing.assert_allclose(gradient, slopes(case, plain, weights), atol=2e-5)


def test_the_cases_have_what_could_go_wrong():
    case = Case()
    assert (case.columns == COLUMNS).any()
    assert (case.following[case.counted] == COLUMNS).any()
    q = np.take_along_axis(softmax(case.logits), np.minimum(case.columns, COLUMNS - 1), axis=1)
    less = q < case.probs
    assert less.any()
    assert not less.all()


def test_agreement_is_of_the_likeliest_ids():
    case = Case()
    expected = 0
    for row, columns, probs, counts in zip(
        case.logits, case.columns, case.probs, case.counted, strict=True
    ):
        expected += counts and columns[np.argmax(probs)] == np.argmax(row)
    assert float(case.top(MIXES[0])[0].agreements) == expected
    sure = Case()
    best = np.argmax(sure.probs, axis=1)[:, None]
    column = np.take_along_axis(sure.columns, best, axis=1)[:, 0]
    reachable = column < COLUMNS
    sure.logits[np.flatnonzero(reachable), column[reachable]] = 50.0
    assert float(sure.top(MIXES[0])[0].agreements) == (reachable & sure.counted).sum()


def test_a_tie_agrees_with_whatever_is_known_of_p():
    case = Case()
    case.logits[:], case.counted[:] = 1.0, True
    case.columns[case.columns == COLUMNS] = 0
    case.target_probs[:, -1] = 1.0
    case.largest = case.target_probs.max(axis=1).astype(np.float32)
    for sums, _ in (case.top(MIXES[0]), case.all(MIXES[0])):
        assert float(sums.agreements) == POSITIONS


def test_a_position_of_which_nothing_is_known_costs_nothing_but_cross_entropy():
    case = Case()
    case.columns, case.probs = np.zeros((POSITIONS, 0), np.int32), np.zeros((POSITIONS, 0))
    sums, gradient = case.top(MIXES[0])
    entropy = plain_all(case, case.logits)[case.counted, 0].sum()
    assert float(sums.loss) == pytest.approx(entropy, rel=1e-5)
    np.testing.assert_allclose(gradient, slopes(case, plain_all, MIXES[0]), atol=2e-5)


def test_the_rest_of_p_counts_not_where_the_draft_has_no_other_ids():
    """All ids of a small vocabulary may be among the likeliest N."""
    case = Case()
    rng = np.random.default_rng(3)
    case.columns = np.argsort(rng.random((POSITIONS, COLUMNS)), axis=1).astype(np.int32)
    case.probs = np.take_along_axis(case.target_probs, case.columns, axis=1)
    for weights in MIXES:
        (top, gradient), (all_rows, expected) = case.top(weights), case.all(weights)
        assert float(top.loss) == pytest.approx(float(all_rows.loss), rel=1e-5)
        np.testing.assert_allclose(gradient, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (
            "from_top",
            "p_rest = jnp.maximum(1.0 - jnp.sum(probs, axis=1), 0.0)",
            "p_rest = 0 * p[:, 0]",
        ),
        ("from_top", "less = q < p", "less = q > p"),
        ("from_top", "outside = common - weights.kl * p_rest / q_rest", "outside = common"),
        ("from_top", "inside = columns < size", "inside = columns <= size"),
        ("from_top", "(outside * mask)[:, None]", "outside[:, None]"),
        ("_cross_entropy", "next_columns < logits.shape[1]", "next_columns <= logits.shape[1]"),
    ],
)
def test_wrong_losses_are_noticed(function, old, new):
    case, weights = Case(), MIXES[-1]
    with edited([Edit(losses, function, old, new)]):
        sums, gradient = case.top(weights, losses.from_top)  # not traced before
    total = plain_loss(plain_top(case, case.logits), weights)[case.counted].sum()
    same = float(sums.loss) == pytest.approx(total, rel=1e-4)
    assert not (same and np.allclose(gradient, slopes(case, plain_top, weights), atol=1e-4))
