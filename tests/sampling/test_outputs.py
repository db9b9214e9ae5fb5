"""Draws of a reduced vocabulary are those of the whole one, were all other tokens impossible."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels.kv_pages import chain_path
from ssd_jax.kernels.sparse import dense
from ssd_jax.sampling import drafting, penalties, prediction, probs
from ssd_jax.sampling.drafting import Saguaro
from ssd_jax.sampling.outputs import columns_of, every_id, ids_of
from tests.sampling.edits import Edit, edited
from tests.sampling.rows import QUICKLY, rows

VOCAB, TOKENS, W = 23, 21, 5
OUTPUTS = np.array([1, 3, 4, 8, 9, 14, 15, 18, 20], np.int32)
N, COPIES = len(OUTPUTS), 40
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7, "bias_ids": (9, 2), "bias": (1.5, 50.0)},
    {"temperature": 1.4},
    {"temperature": 0.8, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 1.1, "min_p": 0.05, "banned": (4, 5), "ban_before": 10**6},
    {"temperature": 0.7, "bias_ids": (20, 22), "bias": (2.0, 9.0), "repetition_penalty": 0.8},
)


def case():
    """Logits [rows, V], settings, starts and what was said."""
    rng = np.random.default_rng(0)
    count = COPIES * len(SETTINGS)
    logits = jnp.asarray(2 * rng.standard_normal((count, VOCAB)), jnp.float32)
    sampling = rows(*(SETTINGS[row % len(SETTINGS)] | {"request": row} for row in range(count)))
    history = penalties.empty(count, VOCAB)
    history = history._replace(
        prompt=jnp.asarray(rng.random((count, VOCAB)) < 0.3),
        output=jnp.asarray(rng.poisson(0.4, (count, VOCAB)), jnp.int32),
    )
    return logits, sampling, jnp.asarray(rng.integers(0, 1000, count), jnp.int32), history


def in_flight(count):
    """Tokens [count, 4] inside and outside the map, and none; how many of them come before."""
    rng = np.random.default_rng(1)
    proposed = rng.integers(-1, VOCAB, (count, 4), dtype=np.int32)
    proposed[:, 0] = np.resize([-1, 0, 2, 9, VOCAB - 1], count)
    return jnp.asarray(proposed), jnp.asarray(rng.integers(0, 5, count), jnp.int32)


def found(part, rule, support, outputs, *, given):
    """What a draft says in one of three ways: a draw, its likeliest tokens, or those by noise."""
    logits, sampling, start, history = given
    if part == "in flight":
        proposed, before = in_flight(len(logits))
        history = penalties.in_flight(
            history, proposed, jnp.arange(len(logits)), chain_path(before), outputs
        )
    elif outputs is not None:
        history = penalties.history_of(history, jnp.arange(len(logits)), outputs)
    common = {"tokens": TOKENS, "outputs": outputs}

    def draw(logits):
        drawn = drafting.draw(
            logits,
            sampling,
            start,
            jnp.array(1),
            lambda: history,
            support=support,
            rule=rule,
            candidates=W,
            saguaro=Saguaro(0.5, jnp.array(2)),
            confident=True,
            **common,
        )
        q = dense(drawn.support, drawn.q, VOCAB)
        return drawn.token, drawn.candidates, drawn.confidence, q

    def likeliest(logits):
        return (drafting.candidates(logits, sampling, start, lambda: history, count=W, **common),)

    def foreseen(logits):
        before = start % 2
        return (
            prediction.predict_bonus(
                logits, sampling, start, before, lambda: history, count=W, rule=rule, **common
            ),
        )

    says = {"draw": draw, "likeliest": likeliest, "in flight": likeliest, "foreseen": foreseen}
    say = says[part]
    return [np.asarray(array) for array in jax.jit(say, compiler_options=QUICKLY)(logits)]


def reduced(part, rule, support):
    """Of logits of the outputs alone."""
    logits, *rest = case()
    given = (logits[:, jnp.asarray(OUTPUTS)], *rest)
    return found(part, rule, support, OUTPUTS, given=given)


@functools.cache
def unreduced(part, rule, support):
    """Of logits of all tokens, of which the others are impossible."""
    logits, *rest = case()
    inside = jnp.zeros(VOCAB, bool).at[jnp.asarray(OUTPUTS)].set(True)
    given = (jnp.where(inside, logits, -jnp.inf), *rest)
    return found(part, rule, VOCAB if support == N else support, None, given=given)


def differ(found, expected):
    """Whether any of it is another; probabilities to rounding."""
    return any(
        (one != other).any() if one.dtype == np.int32 else not np.allclose(one, other, 1e-5, 0)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("part", "rule", "support"),
    [
        ("draw", "ratio", 4),
        ("draw", "ratio", N),
        ("draw", "coupled", 4),
        ("likeliest", "ratio", N),
        ("in flight", "ratio", N),
        ("foreseen", "ratio", N),
        ("foreseen", "coupled", N),
    ],
)
def test_a_reduced_vocabulary_says_what_the_whole_one_would(part, rule, support):
    found = reduced(part, rule, support)
    assert not differ(found, unreduced(part, rule, support))
    assert np.isin(found[0], OUTPUTS).all()
    assert len(np.unique(found[0])) == N
    if part == "draw":
        assert np.isin(found[1], OUTPUTS).all()
        np.testing.assert_array_equal(np.flatnonzero(found[3].any(axis=0)), OUTPUTS)


FAULTS = {
    "noise of the draw by column": (
        Edit(
            drafting,
            "draw",
            "sampling.request, *counter), ids)",
            "sampling.request, *counter), jnp.searchsorted(jnp.asarray(outputs), ids))"
            " if outputs is not None else gumbel_of(keys.derive(sampling.seed, "
            "sampling.request, *counter), ids)",
        ),
        "draw",
        "coupled",
    ),
    "noise of the prediction by column": (
        Edit(
            prediction,
            "predict_bonus",
            "every_id(outputs, allowed.shape[1])",
            "every_id(None, allowed.shape[1])",
        ),
        "foreseen",
        "ratio",
    ),
    "ids forgotten in candidates": (
        Edit(drafting, "_candidates", "ids_of(outputs, ", "ids_of(None, "),
        "likeliest",
        "ratio",
    ),
    "ids applied twice in candidates": (
        Edit(
            drafting,
            "_candidates",
            "return ids_of(outputs, ",
            "return ids_of(outputs, ids_of(outputs, jnp.where(values > -jnp.inf, columns, -1))) "
            "if outputs is not None else (",
        ),
        "likeliest",
        "ratio",
    ),
    "ids forgotten in candidates by noise": (
        Edit(prediction, "predict_bonus", "ids_of(outputs, ", "ids_of(None, "),
        "foreseen",
        "ratio",
    ),
    "ids forgotten in the proposal": (
        Edit(drafting, "sparse_probs", "return q, ids_of(outputs, columns)", "return q, columns"),
        "draw",
        "ratio",
    ),
    "bans by column": (
        Edit(probs, "allowed_logits", "every_id(outputs, ", "every_id(None, "),
        "likeliest",
        "ratio",
    ),
    "bias by column": (
        Edit(penalties, "penalise", "ids if outputs is None else columns_of(outputs, ids)", "ids"),
        "likeliest",
        "ratio",
    ),
    "history by column": (
        Edit(
            penalties, "history_of", "jnp.asarray(outputs)[None]", "jnp.arange(len(outputs))[None]"
        ),
        "likeliest",
        "ratio",
    ),
    "tokens in flight by column": (
        Edit(
            penalties,
            "add_output",
            "columns_of(outputs, jnp.asarray(tokens))",
            "jnp.asarray(tokens)",
        ),
        "in flight",
        "ratio",
    ),
    "tokens in flight that have no column counted for the next": (
        Edit(
            penalties,
            "add_output",
            "columns_of(outputs, jnp.asarray(tokens))",
            "jnp.searchsorted(jnp.asarray(outputs), jnp.asarray(tokens))",
        ),
        "in flight",
        "ratio",
    ),
    "no token in flight counted for the first": (
        Edit(
            penalties,
            "add_output",
            "columns_of(outputs, jnp.asarray(tokens))",
            "jnp.where(jnp.asarray(tokens) < 0, 0, columns_of(outputs, jnp.asarray(tokens)))",
        ),
        "in flight",
        "ratio",
    ),
    "the map forgotten where tokens are in flight": (
        Edit(
            penalties,
            "in_flight",
            "jnp.where(precedes, jnp.asarray(proposed)[row], -1), outputs)",
            "jnp.where(precedes, jnp.asarray(proposed)[row], -1))",
        ),
        "in flight",
        "ratio",
    ),
    "tokens in flight forgotten": (
        Edit(
            penalties,
            "in_flight",
            "return add_output(committed, "
            "jnp.where(precedes, jnp.asarray(proposed)[row], -1), outputs)",
            "return committed",
        ),
        "in flight",
        "ratio",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_in_the_use_of_the_map_is_caught(fault):
    edit, part, rule = FAULTS[fault]
    support = 4 if part == "draw" else N
    right = unreduced(part, rule, support)
    with edited([edit]):
        assert differ(reduced(part, rule, support), right)


def test_where_all_outputs_are_banned_the_first_is_a_point_mass():
    """There is no law to draw from; the target rejects what it has banned as well."""
    outputs = OUTPUTS[[2, 5]]
    banned = {"banned": tuple(int(token) for token in outputs), "ban_before": 100}
    sampling = rows(*({"temperature": hot} | banned for hot in (0.0, 0.9)))
    given = (jnp.ones((2, 2)), sampling, jnp.zeros(2, jnp.int32), penalties.empty(2, 2))
    with_candidates = jax.jit(
        lambda count: drafting.draw(
            *given[:3],
            jnp.array(0),
            lambda: given[3],
            tokens=TOKENS,
            support=2,
            candidates=count,
            outputs=outputs,
        ),
        static_argnums=0,
    )
    for count in (0, 2):
        draw = with_candidates(count)
        assert draw.token.tolist() == [outputs[0]] * 2
        assert draw.support.tolist() == [[outputs[0], -1]] * 2
        assert draw.q.tolist() == [[1, 0]] * 2
        assert (np.asarray(draw.candidates) == -1).all()


def test_columns_and_ids_are_each_others_inverse():
    absent = np.setdiff1d(np.arange(-1, VOCAB + 5), OUTPUTS)
    columns, none, ids = jax.jit(
        lambda: (
            columns_of(OUTPUTS, ids_of(OUTPUTS, jnp.arange(N))),
            columns_of(OUTPUTS, jnp.asarray(absent)),
            ids_of(OUTPUTS, jnp.array([[0, -1]])),
        )
    )()
    np.testing.assert_array_equal(columns, np.arange(N))
    assert (np.asarray(none) == N).all()
    assert ids.tolist() == [[OUTPUTS[0], -1]]
    np.testing.assert_array_equal(every_id(OUTPUTS, N), OUTPUTS)
