"""The draft's order of continuations is that of the noise which draws them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.sampling import ranking
from ssd_jax.sampling.confidence import GAP_EDGES
from ssd_jax.sampling.variants import VARIANTS
from tests.sampling.rows import QUICKLY, empty_history, point_mass, repeated, rows, verify

VOCAB, ROWS = 40, 300
LOGITS = np.random.default_rng(0).normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
HOT, COLD = {"temperature": 0.8, "seed": (9, 0)}, {"temperature": 0.0}
START = np.arange(ROWS, dtype=np.int32) * 7


def ranked(settings, *, parts="any", support=VOCAB, count=5, logits=LOGITS, outputs=None):
    def rank(logits, sampling):
        history = empty_history(ROWS, logits.shape[1])
        return ranking.rank(
            logits, sampling, START + 1, lambda: history, tokens=VOCAB, count=count,
            support=support, outputs=outputs, parts=VARIANTS[parts],
        )  # fmt: skip

    compiled = jax.jit(rank, compiler_options=QUICKLY)
    return compiled(logits, repeated(rows(settings), ROWS))


@pytest.mark.parametrize("parts", ["any", "full"])
@pytest.mark.parametrize("settings", [HOT, COLD, HOT | {"top_k": 3}], ids=["hot", "cold", "top-k"])
def test_the_first_is_what_a_target_with_the_same_logits_draws(settings, parts):
    nothing = point_mass(np.zeros((ROWS, 0), np.int32), np.zeros(ROWS, np.int32))
    outcome = verify(
        LOGITS[:, None], nothing, repeated(rows(settings), ROWS), START,
        empty_history(ROWS, VOCAB), tokens=VOCAB, rule="coupled",
    )  # fmt: skip
    found = ranked(settings, parts=parts)
    assert found.tokens[:, 0].tolist() == outcome.bonus.tolist()
    if "top_k" in settings:
        assert (found.tokens[:, 3:] == -1).all()
        assert (found.tokens[:, :3] >= 0).all()


def test_a_greedy_row_ranks_by_its_logits_and_the_gap_is_theirs():
    found = ranked(COLD)
    assert found.tokens.tolist() == np.argsort(-LOGITS, axis=1)[:, :5].tolist()
    best = -np.sort(-LOGITS, axis=1)
    gap = np.searchsorted(GAP_EDGES, best[:, 0] - best[:, 1], side="right")
    assert found.gap_class.tolist() == gap.tolist()


def test_a_smaller_support_keeps_the_order_of_what_it_has():
    full, part = ranked(HOT, count=VOCAB), ranked(HOT, support=8, count=8)
    likeliest = np.argsort(-LOGITS, axis=1)[:, :8]
    for order, few, ids in zip(full.tokens.tolist(), part.tokens.tolist(), likeliest, strict=True):
        assert few == [token for token in order if token in set(ids.tolist())]


def test_a_reduced_vocabulary_ranks_its_own_ids():
    outputs = np.array([1, 4, 8, 9, 17, 33], np.int32)
    found = ranked(COLD, logits=LOGITS[:, :6], outputs=outputs, count=4)
    expected = outputs[np.argsort(-LOGITS[:, :6], axis=1)[:, :4]]
    assert found.tokens.tolist() == expected.tolist()


def test_a_vocabulary_of_fewer_ids_than_ranks_leaves_the_others_empty():
    found = ranked(HOT, logits=LOGITS[:, :3], outputs=np.array([2, 5, 7], np.int32), count=5)
    assert [sorted(row) for row in found.tokens.tolist()] == [[-1, -1, 2, 5, 7]] * ROWS
    assert (found.tokens[:, 3:] == -1).all()


def test_where_one_token_is_possible_the_gap_is_the_widest():
    found = ranked(HOT | {"top_k": 1})
    assert set(found.gap_class.tolist()) == {len(GAP_EDGES)}
    assert jnp.all(found.tokens[:, 1:] == -1)
