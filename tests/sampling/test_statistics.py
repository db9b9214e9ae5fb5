"""Many rounds of the jitted draft, verification and commit, in mixed batches, follow the law.

That these tests would notice a fault is what `test_mutants.py` shows.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.sampling import simulation
from tests.sampling.evidence import ALPHA
from tests.sampling.mutants import DRAFT, TARGET, half_late
from tests.sampling.simulation import Scenario

pytestmark = pytest.mark.more  # test_mutants.py has the same law with fewer settings

SETTINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.5},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.65},
    "min-p": {"min_p": 0.4},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.6},
    "bias": {"bias_ids": (1, 10**9), "bias": (-1.5, 0.0)},
    "banned at first": {"banned": (0, 3), "ban_before": 2},
    "repetition below one": {"repetition_penalty": 0.7},
    "negative penalties": {"presence_penalty": -0.5, "frequency_penalty": -0.3},
    "top-k, then top-p": {"top_k": 3, "top_p": 0.7},
    "greedy with penalties": {"temperature": 0.0, "presence_penalty": 0.5},
    "all": {
        "temperature": 0.8,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "bias_ids": (2, 10**9),
        "bias": (0.5, 0.0),
        "banned": (1, -1),
        "ban_before": 3,
    },
}


def own_length(round_, drafted, pending, _before):
    """Every row has its own L, another one each round."""
    length = (np.arange(len(pending)) + round_) % (simulation.K + 1)
    return drafted._replace(length=jnp.asarray(length, jnp.int32))


def nothing(_round, drafted, _pending, _before):
    """L = 0: plain decoding."""
    return drafted._replace(length=jnp.zeros_like(drafted.length))


MIXED = Scenario(target=TARGET, draft=DRAFT, settings=tuple(SETTINGS.values()), count=3)


@pytest.fixture(scope="module")
def plain_coupled():
    """The text of the coupled rule when nothing is proposed."""
    return simulation.run(replace(MIXED, rule="coupled", serve=nothing), seed=2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"support": 2, "draft_temperature": 0.5, "serve": own_length},
        {"draft_temperature": 0.0},
        {"draft_temperature": 2.0, "serve": half_late},
        {"serve": nothing},
        {"rule": "block", "support": 2, "draft_temperature": 0.5, "serve": own_length},
        {"rule": "block", "draft_temperature": 2.0, "serve": half_late},
        {"rule": "coupled"},  # the tests below say that the other options give the same tokens
    ],
    ids=[
        "drafted",
        "sparse, own lengths",
        "greedy draft",
        "hot draft, late q",
        "none",
        "block, sparse, own lengths",
        "block, hot draft, late q",
        "coupled",
    ],
)
def test_every_setting_of_a_mixed_batch_keeps_its_law(options):
    scenario = replace(MIXED, **options)
    values = simulation.p_values(scenario, simulation.run(scenario, seed=1))
    unlikely = {n: p for n, p in zip(SETTINGS, values, strict=True) if p <= ALPHA}
    assert not unlikely


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft": np.roll(DRAFT, 1, axis=1)},
        {"draft_temperature": 0.0},
        {"serve": own_length},
        {"serve": half_late},
        {"support": 2, "draft_temperature": 2.0},
    ],
    ids=["as drafted", "another draft", "greedy draft", "own lengths", "guesses", "sparse"],
)
def test_coupled_text_is_that_of_plain_decoding_token_for_token(options, plain_coupled):
    text = simulation.run(replace(MIXED, rule="coupled", **options), seed=2)
    np.testing.assert_array_equal(text, plain_coupled)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_greedy_text_is_that_of_plain_decoding(rule):
    greedy = [index for index, name in enumerate(SETTINGS) if name.startswith("greedy")]
    plain = simulation.run(replace(MIXED, rule=rule, serve=nothing), seed=3)[greedy]
    for options in ({"serve": own_length}, {"serve": half_late}):
        text = simulation.run(replace(MIXED, rule=rule, **options), seed=3)[greedy]
        np.testing.assert_array_equal(text, plain)


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_a_request_says_the_same_in_another_row(rule):
    """Noise belongs to (seed, request), never to a row."""
    one = replace(MIXED, rule=rule, settings=({"top_p": 0.8},) * len(SETTINGS))
    straight = next(simulation.rounds(one, seed=4))
    original = simulation.batch

    def reversed_requests(scenario, seed):
        sampling = original(scenario, seed)
        return sampling._replace(request=sampling.request[::-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "batch", reversed_requests)
        turned = next(simulation.rounds(one, seed=4))
    np.testing.assert_array_equal(simulation.emitted(turned)[::-1], simulation.emitted(straight))
