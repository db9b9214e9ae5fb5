"""Verification of token trees: the tokens that come out are those of decoding one by one."""

import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.sampling.params import NO_TOKEN
from ssd_jax.sampling.penalties import empty
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.variants import VARIANTS
from ssd_jax.sampling.verification import commit, emitted_tokens
from tests.sampling.rows import empty_history, repeated, rows, verify
from tests.sampling.trees import path_of, random_parents, walk

VOCAB, ROWS, NODES, DEPTH = 5, 400, 9, 9
RNG = np.random.default_rng(7)
LOGITS = RNG.normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)  # after each last token
PENALISED = {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.6}
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": (3, 0)},
    {"temperature": 0.0, **PENALISED},
    {"temperature": 0.7, "seed": (4, 0), **PENALISED},
]


def trees(rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parents, tokens without equal siblings, and numbers of real nodes."""
    parents = random_parents(rng, ROWS, NODES)
    tokens = rng.integers(0, VOCAB, (ROWS, NODES)).astype(np.int32)
    for row in range(ROWS):
        for parent in range(NODES):
            siblings = np.flatnonzero(parents[row] == parent)[:VOCAB]
            tokens[row, siblings] = rng.permutation(VOCAB)[: len(siblings)]
            parents[row, np.flatnonzero(parents[row] == parent)[VOCAB:]] = 0
    return parents, tokens, rng.integers(0, NODES + 1, ROWS).astype(np.int32)


def point_masses(tokens: np.ndarray, lengths: np.ndarray) -> Proposal:
    return Proposal(tokens, lengths, tokens[:, :, None], np.ones((*tokens.shape, 1), np.float32))


def tree_outcome(settings, parents, tokens, lengths, *, rule="coupled", parts=None, **options):
    pending = np.zeros((ROWS, 1), np.int32)
    before = np.concatenate([pending, tokens], axis=1)
    return verify(
        LOGITS[before],
        point_masses(tokens, lengths),
        repeated(rows(settings), ROWS),
        np.arange(ROWS, dtype=np.int32) * 20,
        empty_history(ROWS, VOCAB),
        tokens=VOCAB,
        rule=rule,
        parents=parents,
        **({} if parts is None else {"parts": VARIANTS[parts]}),
        **options,
    )


def one_by_one(settings, rule="coupled") -> np.ndarray:
    """[ROWS, DEPTH + 1] tokens of rounds without proposals."""
    start, history = np.arange(ROWS, dtype=np.int32) * 20, empty(ROWS, VOCAB)
    last, text = np.zeros(ROWS, np.int32), []
    nothing = point_masses(np.zeros((ROWS, 0), np.int32), np.zeros(ROWS, np.int32))
    sampling = repeated(rows(settings), ROWS)
    for place in range(DEPTH + 1):
        logits = LOGITS[last][:, None]
        arguments = logits, nothing, sampling, start + place, history
        outcome = verify(*arguments, tokens=VOCAB, rule=rule)
        history = commit(history, nothing, outcome, jnp.ones(ROWS, bool))
        last = np.asarray(outcome.bonus)
        text.append(last)
    return np.stack(text, axis=1)


@pytest.mark.parametrize("parts", [None, "full"])
@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "hot", "penalised", "hot-penalised"])
def test_a_tree_emits_what_decoding_one_by_one_emits(settings, parts):
    parents, tokens, lengths = trees(np.random.default_rng(1))
    text = one_by_one(settings)
    outcome = tree_outcome(settings, parents, tokens, lengths, parts=parts)
    accepted = np.asarray(outcome.accepted)
    emitted = np.asarray(emitted_tokens(point_masses(tokens, lengths), outcome, DEPTH))
    assert emitted.shape == (ROWS, DEPTH + 1)
    for row in range(ROWS):
        count = accepted[row] + 1
        assert emitted[row, :count].tolist() == text[row, :count].tolist()
    assert accepted.max() >= 3
    assert (accepted == 0).any()


@pytest.mark.parametrize("parts", [None, "sampled"])
def test_a_tree_accepts_all_that_the_target_would_say(parts):
    settings = SETTINGS[1]
    parents, tokens, lengths = trees(np.random.default_rng(2))
    text = one_by_one(settings)
    outcome = tree_outcome(settings, parents, tokens, lengths, parts=parts)
    for row, (path, accepted) in enumerate(
        zip(outcome.path.tolist(), outcome.accepted.tolist(), strict=True)
    ):
        # Behind a row of the right path at depth d the target says text[d]; elsewhere anything.
        children = [text[row][min(len(path_of(parents[row], r)), DEPTH)] for r in range(NODES + 1)]
        nodes = walk(parents[row], tokens[row], int(lengths[row]), np.array(children))
        assert accepted == len(nodes)
        assert path == sum(1 << node for node in nodes)


def test_greedy_trees_are_verified_under_the_ratio_rule_beside_sampled_chains():
    parents, tokens, lengths = trees(np.random.default_rng(3))
    of_ratio = tree_outcome(SETTINGS[0], parents, tokens, lengths, rule="ratio")
    of_coupled = tree_outcome(SETTINGS[0], parents, tokens, lengths)
    for one, other in zip(of_ratio, of_coupled, strict=True):
        assert one.tolist() == other.tolist()


def test_history_counts_the_accepted_path_alone():
    parents, tokens, lengths = trees(np.random.default_rng(4))
    outcome = tree_outcome(SETTINGS[1], parents, tokens, lengths)
    proposal = point_masses(tokens, lengths)
    live = jnp.arange(ROWS) % 3 > 0
    history = commit(empty(ROWS, VOCAB), proposal, outcome, live)
    emitted = np.asarray(emitted_tokens(proposal, outcome, DEPTH))
    for row in range(ROWS):
        emitted_ids = emitted[row, : outcome.accepted[row] + 1] if row % 3 else []
        counts = np.bincount(np.array(emitted_ids, int), minlength=VOCAB)
        assert history.output[row].tolist() == counts.tolist()


@pytest.mark.parametrize("parts", [None, "sampled"])
def test_of_equal_siblings_the_first_counts(parts):
    tokens = np.tile(np.arange(VOCAB, dtype=np.int32), (ROWS, 2))[:, :NODES]
    parents, lengths = np.zeros((ROWS, NODES), np.int32), np.full(ROWS, NODES, np.int32)
    outcome = tree_outcome(SETTINGS[1], parents, tokens, lengths, parts=parts)
    assert outcome.accepted.tolist() == [1] * ROWS
    assert set(outcome.path.tolist()) == {1 << node for node in range(VOCAB)}


@pytest.mark.parametrize("parts", [None, "sampled"])
def test_nothing_is_accepted_behind_a_row_without_numbers(parts, monkeypatch):
    parents = np.tile(np.array([0, 0, 1, 2, 3, 4, 5, 6, 7], np.int32), (ROWS, 1))
    text = one_by_one(SETTINGS[0])
    # Nodes 0, 2, 4, .. are the target's own text, nodes 1, 3, .. are beside it.
    chain = np.stack([text[:, 0], text[:, 0] + 1 & 3, text[:, 1]], axis=1)
    tokens = np.zeros((ROWS, NODES), np.int32)
    tokens[:, :3] = chain
    lengths = np.full(ROWS, 3, np.int32)
    full = tree_outcome(SETTINGS[0], parents, tokens, lengths, parts=parts)
    assert set(full.path.tolist()) == {0b101}
    damaged = LOGITS.copy()
    monkeypatch.setitem(globals(), "LOGITS", damaged)
    damaged[text[0, 0]] = np.nan
    outcome = tree_outcome(SETTINGS[0], parents, tokens, lengths, parts=parts)
    assert outcome.path[0] == 0b1
    assert outcome.accepted[0] == 1
    assert outcome.bonus[0] == NO_TOKEN
