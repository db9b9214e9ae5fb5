"""Programs without decisions say what the one that decides by itself says."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels import distribution, truncation
from ssd_jax.kernels import rows as row_operations
from ssd_jax.kernels.verify import xla
from ssd_jax.sampling import drafting, penalties, verification
from ssd_jax.sampling.drafting import Saguaro
from ssd_jax.sampling.judgement import rejection
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.variants import ON_DEVICE, VARIANTS, Parts, cheapest_variant, variant_name
from tests.sampling.edits import Edit, edited
from tests.sampling.rows import QUICKLY, history_of, rows, words
from tests.selection import cases

K, VOCAB, TOKENS, SUPPORT = 2, 4500, 4490, 8  # rows long enough to be mapped one by one on CPU
NEEDS = {
    "greedy": [{"temperature": 0.0}],
    "sampled": [{}, {"temperature": 0.6}],
    "truncated": [
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.7},
        {"temperature": 2.0, "top_p": 0.999},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    ],
    "full": [
        {"temperature": 0.0, "repetition_penalty": 1.8},
        {"frequency_penalty": 0.9, "top_k": 9},
        {"presence_penalty": 2.0},
        {"bias_ids": (7, 4400), "bias": (9.0, 8.0)},
        {"banned": (3, -1), "ban_before": 10**6},
        {"temperature": 0.0, "banned": (3, 5), "ban_before": 12},
        {"temperature": 0.0, "bad_word_ids": words((3,))},
        {"bad_word_ids": words((9, 3), (3, 3))},
    ],
}
"""Settings of rows, by the cheapest variant that has what they need."""


def settings_for(variant: str, least: int = 12) -> list[dict]:
    """Of a mixed batch of some `least` rows that a variant serves."""
    served = [*NEEDS] if variant == "any" else [*NEEDS][: [*NEEDS].index(variant) + 1]
    found = [settings for name in served for settings in NEEDS[name]]
    return found * max(1, least // len(found))


def batch(settings: list[dict]):
    """Logits with ties and impossible tokens, proposals and histories for rows of settings; one is
    idle at the end. Laws of later positions are flatter."""
    settings = [*settings, settings[-1]]
    count, rng = len(settings), np.random.default_rng(len(settings))
    spread = np.array([2.0, 1.5, 1.0])[:, None]
    logits = rng.normal(0, spread, (count, K + 1, VOCAB)).round(1).astype(np.float32)  # many ties
    logits[:, :, 3] = 6  # what is banned would be likely
    logits[:, :, rng.choice(VOCAB, 600, replace=False)] = -np.inf
    likely = np.argsort(-logits[:, :K], axis=-1)[..., :SUPPORT]
    q = rng.dirichlet(np.ones(SUPPORT), (count, K)).astype(np.float32)
    chosen = rng.integers(0, 2, (count, K, 1))
    proposal = Proposal(
        np.take_along_axis(likely, chosen, axis=-1)[..., 0].astype(np.int32),
        rng.integers(0, K + 1, count).astype(np.int32),
        likely.astype(np.int32),
        q,
    )
    proposal.length[-1] = 0
    start = np.arange(8, 8 + count, dtype=np.int32)
    start[-1] = -1
    history = history_of(
        rng.random((count, VOCAB)) < 0.3,
        rng.poisson(0.3, (count, VOCAB)).astype(np.int32),
        [[9]] * count,
    )
    of_rows = [{**setting, "request": row, "seed": (11, 0)} for row, setting in enumerate(settings)]
    return logits, proposal, rows(*of_rows), start, history


def verified(batch, parts: Parts, rule: str) -> list[tuple[int, int]]:
    """(k, t*) of all rows."""

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(logits, proposal, sampling, start, history):
        return verification.verify(
            logits, proposal, sampling, start, history, tokens=TOKENS, rule=rule, parts=parts
        )

    outcome = run(*batch)
    return list(zip(outcome.accepted.tolist(), outcome.bonus.tolist(), strict=True))


@functools.cache
def decided(variant: str, rule: str, least: int = 12) -> list[tuple[int, int]]:
    return verified(batch(settings_for(variant, least)), ON_DEVICE, rule)


CASES = [(variant, rule) for variant in NEEDS for rule in ("ratio", "block")]
CASES += [("full", "coupled")]


@pytest.mark.parametrize(
    ("variant", "rule"), cases(CASES, ("sampled", "ratio"), ("full", "ratio"), ("full", "block"))
)
def test_outcomes_are_those_of_the_program_that_decides(variant, rule):
    found = verified(batch(settings_for(variant)), VARIANTS[variant], rule)
    assert found == decided(variant, rule)
    assert len({k for k, _ in found}) > 1


@pytest.mark.more
@pytest.mark.parametrize("variant", ["sampled", "truncated"])
def test_outcomes_are_the_same_where_a_law_is_summed_in_one_pass(monkeypatch, variant):
    monkeypatch.setattr(xla, "best_and_mass", row_operations._mass_in_one_pass)
    found = verified(batch(settings_for(variant)), VARIANTS[variant], "ratio")
    assert found == decided(variant, "ratio")


@pytest.mark.parametrize(
    ("cheaper", "variant"), [("greedy", "sampled"), ("sampled", "truncated"), ("truncated", "full")]
)
def test_a_variant_too_cheap_for_its_rows_is_caught(cheaper, variant):
    assert verified(batch(settings_for(variant)), VARIANTS[cheaper], "ratio") != decided(
        variant, "ratio"
    )


def drawn(settings: list[dict], parts: Parts, support: int):
    logits, _, sampling, start, history = batch(settings)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(logits, sampling, start, history):
        return drafting.draw(
            logits,
            sampling,
            start,
            jnp.int32(1),
            lambda: history,
            tokens=TOKENS,
            support=support,
            candidates=4,
            saguaro=Saguaro(0.5, jnp.int32(2)),
            confident=True,
            parts=parts,
        )

    return jax.tree.map(np.asarray, run(logits[:, 0], sampling, start, history))


@pytest.mark.more
@pytest.mark.parametrize(("variant", "support"), [*((v, 16) for v in NEEDS), ("full", VOCAB)])
def test_draws_are_those_of_the_program_that_decides(variant, support):
    settings = settings_for(variant)
    found = drawn(settings, VARIANTS[variant], support)
    expected = drawn(settings, ON_DEVICE, support)
    for name in ("token", "support", "candidates", "confidence"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    np.testing.assert_allclose(found.q, expected.q, rtol=1e-6)


def laws(truncated: bool | None):
    """Laws after filters: of flat ones, sharp ones, ties everywhere, and neighbouring floats."""
    filters = NEEDS["truncated"]
    rng = np.random.default_rng(3)
    kinds = [
        np.zeros(VOCAB),
        rng.normal(0, 0.01, VOCAB),
        rng.normal(0, 9, VOCAB),
        rng.normal(0, 2, VOCAB).round(),
        np.where(np.arange(VOCAB) == 77, 0.0, -np.inf),
        -np.arange(VOCAB) / 30,  # down to what is no float32
    ]
    weights = np.exp(np.stack(kinds) - np.max(kinds, axis=1, keepdims=True))
    p = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    next_to = np.float32(1 / VOCAB).view(np.int32) + rng.permutation(VOCAB).astype(np.int32)
    p = np.repeat(np.concatenate([p, next_to.view(np.float32)[None]]), len(filters), axis=0)
    truncate = functools.partial(distribution.truncate, truncated=truncated)
    law = jax.jit(truncate, compiler_options=QUICKLY)
    return np.asarray(law(p, rows(*filters * (len(kinds) + 1))))


def test_filters_in_a_fixed_number_of_steps_keep_the_same_tokens():
    found, expected = laws(True), laws(None)
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    counts = (expected > 0).sum(axis=1)
    assert set(counts.tolist()) >= {1, 5, VOCAB}  # ties are kept together


@pytest.mark.parametrize("truncated", [True, None])
def test_a_top_p_that_is_reached_exactly_keeps_no_more(truncated):
    p = np.array([[0.5, 0.25, 0.125, 0.125]], np.float32)
    truncate = functools.partial(distribution.truncate, truncated=truncated)
    law = jax.jit(truncate, compiler_options=QUICKLY)
    assert law(p, rows({"top_p": 0.5})).tolist() == [[1, 0, 0, 0]]


STEPS = "jax.lax.fori_loop(0, _BITS // _DIGIT"
FAULTS = {
    "one step too few": ("_largest_threshold", STEPS, f"{STEPS} - 1"),
    "a digit never tried": ("_largest_threshold", "range(1, 2**_DIGIT)", "range(1, 7)"),
    "ties at the threshold cut": ("apply", "p >= cut.low", "p > cut.low"),
    "top-k forgotten": ("cut", "top_k > 0, _largest_threshold", "top_k < 0, _largest_threshold"),
    "top-p forgotten": ("cut", "where(top_p < 1", "where(top_p > 1"),
    "top-p of what top-k has cut off": ("cut", "jnp.where(top_k > 0, _mass(p, low), 1.0)", "1.0"),
    "min-p forgotten": ("cut", "min_p * best", "0.0"),
    "divided by what was cut off, too": ("_mass", "jnp.where(p >= low, p, 0.0)", "p"),
    "not divided": ("cut", "1 / _mass(p, low)", "1.0"),
    "divided for top-k alone": ("cut", "applies = (top_k > 0)", "applies = (top_k > 0) #"),
    "the likeliest token cut": ("cut", "jnp.minimum(low, best)", "low * 1.01"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_search_are_caught(fault):
    with edited([Edit(truncation, *FAULTS[fault])]), pytest.raises(AssertionError):
        test_filters_in_a_fixed_number_of_steps_keep_the_same_tokens()


ENOUGH = 60  # rows, so that some draws are between a cut and that of another position
APPLIED = "_probs_of(normalisation, values.sum(axis=-1, keepdims=True), settings)"
OF_THE_FIRST = (
    "jax.tree.map(lambda x: jnp.repeat(x[::3], 3, axis=0), truncation.cut(uncut, settings))"
)
VERIFYING = {
    "the cut of a text's first position": (
        xla,
        "_normalisation",
        "truncation.cut(uncut, settings)",
        OF_THE_FIRST,
    ),
    "a law of another position": (rejection, "draw_bonus", "* width + accepted", "* width"),
    "cuts forgotten in acceptance": (
        xla,
        "at_once",
        APPLIED,
        "values.sum(axis=-1, keepdims=True)",
    ),
    "cuts forgotten in the bonus": (
        xla,
        "at_once",
        "_probs_of(block_normalisation, values, ",
        "(lambda *_: values)(",
    ),
    "greedy rows drawn": (
        xla,
        "at_once",
        "judges.is_sampled, sampled_outcome",
        "jnp.ones_like(judges.is_sampled), sampled_outcome",
    ),
}


@pytest.mark.parametrize("fault", VERIFYING)
def test_faults_of_verifying_at_once_are_caught(fault):
    with edited([Edit(*VERIFYING[fault])]):
        found = verified(batch(settings_for("full", ENOUGH)), VARIANTS["full"], "ratio")
    assert found != decided("full", "ratio", ENOUGH)


@pytest.fixture
def computed_anew(monkeypatch):
    """Weights that are computed anew round in another way, as XLA may have it."""
    exact, times = xla.weights_of, itertools.count()
    monkeypatch.setattr(
        xla,
        "weights_of",
        lambda *arguments: exact(*arguments) * np.float32(1 - 1e-6 * next(times)),
    )


@pytest.mark.more
def test_thresholds_hold_for_the_numbers_they_were_looked_for_in(computed_anew):
    least_likely_are_proposed = batch([{"top_k": 1 + row % 2} for row in range(12)])
    found = verified(least_likely_are_proposed, VARIANTS["truncated"], "ratio")
    assert found == verified(least_likely_are_proposed, ON_DEVICE, "ratio")


def test_a_proposed_token_computed_anew_is_caught(computed_anew):
    score = "jnp.where(is_token, scores, 0.0).sum(axis=-1, keepdims=True)"
    weight = f"weights_of({score}, settings, normalisation.top)"
    anew = f"_probs_of(normalisation, {weight} / normalisation.total, settings)"
    with (
        edited([Edit(xla, "at_once", APPLIED, anew)]),
        pytest.raises(AssertionError),
    ):
        test_thresholds_hold_for_the_numbers_they_were_looked_for_in(None)


FILTERS = [
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 2, "top_p": 0.5},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 40, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
]


def rejected(variant: str) -> int:
    """Of proposals of the least likely token that filters keep, by a q below p: all are due."""
    rng, times = np.random.default_rng(5), 96
    settings = [{**filter_, "temperature": 0.7} for filter_ in FILTERS for _ in range(times)]
    count = len(settings)
    logits = rng.normal(0, 2, (count, 2, 400)).astype(np.float32)
    sampling, start = rows(*settings), np.full(count, 6, np.int32)
    history = penalties.empty(count, 400)

    def proposed(token, q) -> Proposal:
        return Proposal(token[:, None], np.ones(count, np.int32), token[:, None, None], q)

    first = proposed(np.zeros(count, np.int32), np.ones((count, 1, 1), np.float32))
    law = verification.target_probs(logits, first, sampling, start, history, tokens=400)
    last = np.where(law[:, 0] > 0, law[:, 0], 2.0)
    least = proposed(last.argmin(-1).astype(np.int32), last.min(-1)[:, None, None] / 2)
    run = functools.partial(verification.verify, tokens=400, parts=VARIANTS[variant])
    outcome = jax.jit(run)(logits, least, sampling, start, history)
    return int((np.asarray(outcome.accepted) == 0).sum())


@pytest.mark.more
@pytest.mark.parametrize("variant", ["truncated", "full", "any"])
def test_the_last_token_that_filters_keep_can_be_accepted(variant):
    assert rejected(variant) == 0


@pytest.mark.parametrize("variant", ["sampled", "truncated", "any"])
def test_the_law_that_is_reported_is_the_one_that_is_drawn_from(monkeypatch, variant):
    """A total that rounds in another way keeps a token more, which then is reported."""
    exact = xla.best_and_mass

    def more(scores, temperature):
        best, token, total = exact(scores, temperature)
        return best, token, total * np.float32(1 + 1e-6)

    monkeypatch.setattr(xla, "best_and_mass", more)
    sampling = rows({"top_p": 0.75 if variant != "sampled" else 1.0}, {"temperature": 0.0})
    logits = jnp.log(jnp.array([[[0.1, 0.25, 0.15, 0.5]]] * 2, jnp.float32))
    start, history = np.full(2, 6, np.int32), penalties.empty(2, 4)
    ids, q = np.zeros((2, 0, 1), np.int32), np.zeros((2, 0, 1), np.float32)
    none = Proposal(ids[..., 0], np.zeros(2, np.int32), ids, q)
    law = verification.target_probs(
        logits, none, sampling, start, history, tokens=4, parts=VARIANTS[variant]
    )
    sizes = {"sampled": [1, 1, 1, 1], "truncated": [0, 1, 1, 1], "any": [0, 1, 0, 1]}[variant]
    assert (np.asarray(law)[:, 0] > 0).tolist() == [[*map(bool, sizes)], [False] * 3 + [True]]


def program_text(parts: Parts, rule: str) -> str:
    """A verification and a draw, compiled."""
    logits, proposal, sampling, start, history = batch(settings_for("full"))

    def run(logits, proposal, sampling, start, history):
        one = verification.verify(
            logits, proposal, sampling, start, history, tokens=TOKENS, rule=rule, parts=parts
        )
        two = drafting.draw(
            logits[:, 0], sampling, start, jnp.int32(1), lambda: history,
            tokens=TOKENS, support=SUPPORT, candidates=4, confident=True, parts=parts,
        )  # fmt: skip
        return one, two

    jitted = jax.jit(run, compiler_options=QUICKLY)
    return jitted.lower(logits, proposal, sampling, start, history).compile().as_text()


@pytest.mark.parametrize(
    ("name", "rule"),
    cases(
        [*itertools.product(VARIANTS, ("ratio", "block"))],
        ("greedy", "ratio"),
        ("any", "ratio"),
        ("sampled", "block"),
    ),
)
def test_only_the_program_that_decides_has_branches_and_loops_of_unknown_length(name, rule):
    text = program_text(VARIANTS[name], rule)
    loops = [line for line in text.splitlines() if " while(" in line]
    unknown = [line for line in loops if "known_trip_count" not in line]
    assert (" conditional(" in text) == (name == "any")
    assert bool(unknown) == (name == "any")


EVERY = [variant_name(("run", 1), variant) for variant in NEEDS]


@pytest.mark.parametrize("bits", list(np.ndindex(2, 2, 2)))
def test_the_cheapest_variant_that_has_all_that_is_needed_is_taken(bits):
    needed = Parts(*map(bool, bits))
    *_, chosen = cheapest_variant(EVERY, ("run", 1), lambda: needed)
    fit = [name for name in NEEDS if VARIANTS[name].has(needed)]
    assert chosen == fit[0]


def test_rows_are_not_looked_at_for_a_program_that_decides():
    assert cheapest_variant([("run", 1)], ("run", 1), lambda: pytest.fail("asked")) == ("run", 1)
