"""The law under a grammar: the target's without the tokens that may not follow, at every position
of a verification, and none of them is ever emitted."""

from __future__ import annotations

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.sampling import drafting, probs, topology, verification
from ssd_jax.sampling.params import NO_TOKEN
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.variants import ON_DEVICE, VARIANTS
from tests.fakes.grammars import mask_of
from tests.sampling.edits import Edit, edited
from tests.sampling.evidence import ALPHA, p_value
from tests.sampling.reference import next_law
from tests.sampling.rows import QUICKLY, empty_history, point_mass, rows

VOCAB, PADDED = 37, 40  # more than a word of bits; ids beyond do not exist
SUCCESSORS = [{(3 * t + 1) % VOCAB, (t + 5) % VOCAB, (7 * t) % VOCAB, 36} for t in range(VOCAB)]
SETTINGS = [
    {"temperature": 0.7, "presence_penalty": 0.5},
    {"top_k": 2},
    {"top_p": 0.6, "temperature": 1.3},
    {"temperature": 0.0},
]
PATHS = [(1, 2), (4, 13), (0, 36), (20, 25)]
CASES = list(itertools.product(SETTINGS, PATHS))


def masks_of_paths():
    """Of the pending token 0 and the tokens behind it."""
    return np.array(
        [[mask_of(SUCCESSORS[token], VOCAB) for token in (0, *path)] for _, path in CASES]
    )


def target_law(logits, masks, parts=ON_DEVICE):
    sampling = rows(*(settings for settings, _ in CASES))
    tokens = np.array([path for _, path in CASES], np.int32)
    history = empty_history(len(CASES), PADDED)

    def law(logits, masks, proposal, sampling, history):
        return verification.target_probs(
            logits, proposal, sampling, jnp.full(len(CASES), 7), history,
            tokens=VOCAB, parts=parts, masks=masks,
        )  # fmt: skip

    proposal = point_mass(tokens, np.full(len(CASES), 2, np.int32))
    return jax.jit(law, compiler_options=QUICKLY)(logits, masks, proposal, sampling, history)


def wrong_laws(parts=ON_DEVICE):
    """Positions whose law is not the target's under the grammar."""
    logits = np.random.default_rng(0).normal(0, 2, (len(CASES), 3, PADDED)).astype(np.float32)
    law = np.asarray(target_law(logits, masks_of_paths(), parts))
    wrong = []
    for (row, (settings, path)), place in itertools.product(enumerate(CASES), range(3)):
        allowed = np.full(VOCAB, -np.inf)
        possible = [*SUCCESSORS[(0, *path)[place]]]
        allowed[possible] = logits[row, place, possible]
        expected = next_law(allowed, settings, [], path[:place])
        if not np.allclose(law[row, place, :VOCAB], expected, atol=1e-5):
            wrong.append((row, place))
    return wrong


@pytest.mark.parametrize("variant", ["any", "full"])
def test_every_position_has_the_law_of_its_mask(variant):
    assert wrong_laws(VARIANTS[variant]) == []


FAULTS = {
    "the mask of the position before": (
        verification,
        "_positions",
        "[block.number]",
        "[jnp.maximum(block.number - 1, 0)]",
    ),
    "no mask": (verification, "_positions", "masks is not None", "False"),
    "bits from the other end": (
        probs,
        "only_allowed",
        "jnp.arange(BITS)",
        "jnp.arange(BITS)[::-1]",
    ),
    "forbidden in place of allowed": (probs, "only_allowed", "== 1", "== 0"),
    "the first word alone": (
        probs,
        "only_allowed",
        "masks[:, :, None]",
        "masks[:, :1, None] | 0 * masks[:, :, None]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_masks_are_caught(fault):
    with edited([Edit(*FAULTS[fault])]):
        assert wrong_laws()


def test_a_mask_behind_the_filters_is_caught():
    """top_k of all tokens, and then those of the grammar, is another law."""
    right = verification.target_probs

    def late(*arguments, masks, **named):
        p = right(*arguments, masks=None, **named)
        allowed = probs.only_allowed(
            jnp.zeros((p.shape[0] * p.shape[1], PADDED)), masks.reshape(-1, masks.shape[-1])
        )
        filtered = jnp.where(allowed.reshape(p.shape) == 0, p, 0)
        return filtered / jnp.maximum(filtered.sum(axis=-1, keepdims=True), 1e-9)

    with mock.patch.object(verification, "target_probs", late):
        rows_wrong = {row for row, _ in wrong_laws()}
    assert {CASES[row][0].get("top_k", 0) for row in rows_wrong} >= {2}


RULES = pytest.mark.parametrize("rule", ["ratio", "block", "coupled"])


@RULES
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_forbidden_token_is_rejected_and_what_is_behind_it_does_not_matter(rule, backend):
    """Greedy or sampled, with q of any size; the bonus token is an allowed one."""
    cases, count = [{"temperature": 0.0}, {"temperature": 1.0}], 40
    logits = np.random.default_rng(1).normal(0, 1, (2 * count, 3, VOCAB)).astype(np.float32)
    logits[:, 0, 11] = 30.0  # the target likes the forbidden token best
    allowed = mask_of({3, 4}, VOCAB)
    masks = np.array([[allowed, np.full_like(allowed, -1), allowed]] * 2 * count)
    tokens = np.array([[11, 5]] * 2 * count, np.int32)
    proposal = Proposal(
        tokens, np.full(2 * count, 2, np.int32), tokens[..., None],
        np.full((2 * count, 2, 1), 1.0 if rule == "coupled" else 0.3, np.float32),
    )  # fmt: skip
    sampling = rows(*(case | {"request": n} for case in cases for n in range(count)))
    run = jax.jit(
        lambda logits, proposal, sampling, history, masks: verification.verify(
            logits, proposal, sampling, jnp.full(2 * count, 7), history, tokens=VOCAB, rule=rule,
            masks=masks, backend=backend,
        ),
        compiler_options=QUICKLY,
    )  # fmt: skip
    outcome = run(logits, proposal, sampling, empty_history(2 * count, VOCAB), masks)
    assert outcome.accepted.tolist() == [0] * 2 * count
    bonus = outcome.bonus.tolist()
    assert set(bonus) == {3, 4}
    best = np.where(logits[:count, 0, 3] >= logits[:count, 0, 4], 3, 4)
    assert bonus[:count] == best.tolist()


def test_where_a_grammar_allows_nothing_no_token_is_drawn():
    masks = np.zeros((2, 1, 2), np.int32)
    run = jax.jit(
        lambda logits, sampling, history, masks: verification.verify(
            logits, point_mass(jnp.zeros((2, 0), jnp.int32), jnp.zeros(2, jnp.int32)), sampling,
            jnp.full(2, 7), history, tokens=VOCAB, masks=masks,
        ),
        compiler_options=QUICKLY,
    )  # fmt: skip
    sampling = rows({"temperature": 0.0}, {})
    outcome = run(np.zeros((2, 1, VOCAB), np.float32), sampling, empty_history(2, VOCAB), masks)
    assert outcome.bonus.tolist() == [NO_TOKEN] * 2


def test_nodes_of_a_tree_have_masks_of_their_own():
    logits = np.zeros((1, 4, VOCAB), np.float32)
    tokens, parents = np.array([[5, 6, 7]], np.int32), np.array([[0, 0, 2]], np.int32)
    allowed = [{5, 6}, {1}, {7}, {9}]
    masks = np.array([[mask_of(tokens, VOCAB) for tokens in allowed]])
    assert topology.paths(jnp.asarray(parents)).tolist() == [[0, 1, 2, 6]]
    run = jax.jit(
        lambda logits, proposal, history, parents, masks: verification.target_probs(
            logits, proposal, jax.tree.map(jnp.asarray, rows({})), jnp.full(1, 7), history,
            tokens=VOCAB, parents=parents, masks=masks,
        ),
        compiler_options=QUICKLY,
    )  # fmt: skip
    proposal = point_mass(tokens, np.full(1, 2, np.int32))
    law = run(logits, proposal, empty_history(1, VOCAB), parents, masks)
    assert [set(np.flatnonzero(row).tolist()) for row in np.asarray(law[0])] == allowed


COUNT = 4000
P = np.array([0.1, 0.4, 0.3, 0.2])
Q = np.array([0.3, 0.1, 0.2, 0.4])
AFTER = [{1, 3}, {0, 2, 3}, {1}, {0, 1, 2}]
"""What may follow each token, the pending one is 0."""


def emitted(rule, cut):
    """The first token behind the pending one, and the next where the round gives it, of many rounds
    of one proposed token.

    Args:
      cut: leaves out a proposed token that is forbidden, which is wrong.
    """
    sampling = rows(*({"request": n, "seed": (5, 0)} for n in range(COUNT)))
    vocab = len(P)
    history = empty_history(COUNT, vocab)
    masks = np.array([mask_of(tokens, vocab) for tokens in AFTER])

    def play(sampling, history):
        start = jnp.full(COUNT, 7)
        logits = jnp.broadcast_to(jnp.log(Q), (COUNT, vocab)).astype(jnp.float32)
        drawn = drafting.draw(
            logits, sampling, start, jnp.array(0), lambda: history, tokens=vocab, support=vocab,
            rule=rule,
        )  # fmt: skip
        is_allowed = (jnp.asarray(masks[0, 0]) >> drawn.token) & 1 == 1
        proposal = Proposal(
            drawn.token[:, None],
            jnp.where(is_allowed | (not cut), 1, 0).astype(jnp.int32),
            drawn.support[:, None],
            drawn.q[:, None],
        )
        of_rows = jnp.stack(
            [
                jnp.full((COUNT, 1), jnp.asarray(masks)[0, 0]),
                jnp.where(is_allowed[:, None], jnp.asarray(masks)[drawn.token], -1),
            ],
            axis=1,
        )
        p = jnp.broadcast_to(jnp.log(P), (COUNT, 2, vocab)).astype(jnp.float32)
        outcome = verification.verify(
            p, proposal, sampling, start, history, tokens=vocab, rule=rule, masks=of_rows
        )
        return verification.emitted_tokens(proposal, outcome), outcome.accepted

    return jax.tree.map(np.asarray, jax.jit(play, compiler_options=QUICKLY)(sampling, history))


def evidence(rule, *, cut=False):
    tokens, accepted = emitted(rule, cut)
    law = np.array([p if token in AFTER[0] else 0 for token, p in enumerate(P)])
    first = p_value(np.bincount(tokens[:, 0], minlength=4), law / law.sum())
    behind = [first]
    for token in AFTER[0]:
        rows_behind = (accepted == 1) & (tokens[:, 0] == token)
        law = np.array([p if t in AFTER[token] else 0 for t, p in enumerate(P)])
        counts = np.bincount(tokens[rows_behind, 1], minlength=4)
        assert counts.sum() > 200
        behind.append(p_value(counts, law / law.sum()))
    return min(behind)


@RULES
def test_tokens_follow_the_law_of_the_grammar_whatever_is_proposed(rule):
    assert evidence(rule) > ALPHA


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_proposal_that_is_cut_before_a_forbidden_token_is_caught(rule):
    assert evidence(rule, cut=True) < ALPHA
