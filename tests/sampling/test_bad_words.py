"""Bad words against their definition, at every place of a text, a draft and a verification."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.sampling import bad_words, drafting, penalties, verification
from ssd_jax.sampling.judgement.outcome import chain_outcome
from ssd_jax.sampling.params import MAX_BAD_WORD_TOKENS, NO_TOKEN
from ssd_jax.sampling.probs import allowed_logits
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.variants import ON_DEVICE, VARIANTS
from tests.sampling.edits import Edit, edited
from tests.sampling.reference import next_law
from tests.sampling.rows import QUICKLY, empty_history, history_of, point_mass, rows, words

VOCAB = 5


def banned(sequences, output, *, outputs=None):
    """Ids that are impossible after an output whose prompt said everything."""
    columns = VOCAB if outputs is None else len(outputs)
    history = history_of(np.ones((1, columns), bool), np.zeros((1, columns), np.int32), [output])
    sampling = rows({"bad_word_ids": words(*sequences)})
    logits = allowed_logits(
        jnp.zeros((1, columns)), sampling, jnp.array([9]), lambda: history, VOCAB, outputs
    )
    ids = np.arange(VOCAB) if outputs is None else outputs
    return ids[np.asarray(logits[0]) == -np.inf].tolist()


@pytest.mark.parametrize(
    ("sequences", "output", "expected"),
    [
        ([(3,)], [], [3]),
        ([(3,)], [1, 2], [3]),
        ([(1, 3)], [], []),
        ([(1, 3)], [1], [3]),
        ([(1, 3)], [1, 2], []),
        ([(1, 3)], [3], []),
        ([(2, 1, 3)], [2, 1], [3]),
        ([(2, 1, 3)], [1], []),
        ([(2, 1, 3)], [2, 2, 1], [3]),
        ([(2, 1, 3)], [2, 1, 1], []),
        ([(0, 0)], [0], [0]),
        ([(1, 3), (2, 4)], [1], [3]),
        ([(1, 3), (1, 4), (0,)], [1], [0, 3, 4]),
        ([(1, 3), (1, 3)], [1], [3]),
        ([(0, 1, 2, 3, 4, 0, 1, 2)], [0, 1, 2, 3, 4, 0, 1], [2]),
        ([(0, 1, 2, 3, 4, 0, 1, 2)], [1, 2, 3, 4, 0, 1], []),
    ],
)
def test_the_last_token_of_a_word_is_impossible_right_after_the_others(sequences, output, expected):
    assert banned(sequences, output) == expected


def test_a_reduced_vocabulary_bans_the_tokens_that_it_has():
    outputs = np.array([1, 3, 4], np.int32)
    assert banned([(0, 3), (0, 2), (4,)], [0], outputs=outputs) == [3, 4]


def test_a_row_without_bad_words_is_untouched_beside_one_with():
    history = empty_history(2, VOCAB)
    sampling = rows({}, {"bad_word_ids": words((2,))})
    logits = allowed_logits(
        jnp.ones((2, VOCAB)), sampling, jnp.array([1, 1]), lambda: history, VOCAB
    )
    assert (np.asarray(logits) == -np.inf).tolist() == [
        [False] * 5,
        [False] * 2 + [True] + [False] * 2,
    ]


WORDS = [[(0, 1), (1, 2, 3), (3, 3)], [(2,), (4, 0)], [(0, 0, 0), (1, 4)], []]
OUTPUTS = [[0], [1, 2], [4], [3, 0, 0]]
PATHS = list(itertools.product(range(VOCAB), repeat=2))
SETTINGS = [
    {"bad_word_ids": words(*sequences), "temperature": 0.7, "presence_penalty": 0.5}
    for sequences in WORDS
]


def batch():
    """Rows of all proposals of two tokens, for texts of several words and outputs."""
    cases = list(itertools.product(range(len(WORDS)), OUTPUTS, PATHS))
    logits = np.random.default_rng(0).normal(0, 1, (len(cases), 3, VOCAB)).astype(np.float32)
    counts = [np.bincount(output, minlength=VOCAB) for _, output, _ in cases]
    history = history_of(
        np.zeros((len(cases), VOCAB), bool),
        np.array(counts, np.int32),
        [output for _, output, _ in cases],
    )
    tokens = np.array([path for _, _, path in cases], np.int32)
    return cases, logits, history, tokens


def wrong_laws(parts=ON_DEVICE):
    """Positions of verifications whose law is not that of the text up to there."""
    cases, logits, history, tokens = batch()
    sampling = rows(*(SETTINGS[which] for which, _, _ in cases))
    start = np.full(len(cases), 7, np.int32)

    def law(logits, proposal, sampling, start, history):
        return verification.target_probs(
            logits, proposal, sampling, start, history, tokens=VOCAB, parts=parts
        )

    proposal = point_mass(tokens, np.full(len(cases), 2, np.int32))
    run = jax.jit(law, compiler_options=QUICKLY)
    found = np.asarray(run(logits, proposal, sampling, start, history))
    return [
        (which, output, path[:place])
        for row, (which, output, path) in enumerate(cases)
        for place in range(3)
        if not np.allclose(
            found[row, place],
            next_law(logits[row, place], SETTINGS[which], [], [*output, *path[:place]]),
            atol=1e-5,
        )
    ]


@pytest.mark.parametrize("variant", ["any", "full"])
def test_every_position_of_a_verification_sees_the_bans_of_its_path(variant):
    assert wrong_laws(VARIANTS[variant]) == []


FAULTS = {
    "the round's first position alone": (
        verification,
        "_positions",
        "block.row, block.path)",
        "block.row, 0 * block.path)",
    ),
    "one token late": (
        bad_words,
        "completions",
        "history.recent[:, None]",
        "jnp.roll(history.recent, 1, axis=-1)[:, None]",
    ),
    "a beginning bans the end of another": (
        bad_words,
        "completions",
        "jnp.where(matches, last, -1)",
        "jnp.where(jnp.any(matches, axis=-1, keepdims=True), last, -1)",
    ),
    "one token of the beginning is enough": (bad_words, "completions", "jnp.all(", "jnp.any("),
    "the newest token forgotten": (
        penalties,
        "_append_recent",
        "slot = length - ",
        "slot = length - 1 - ",
    ),
    "bad words without penalties alone": (
        bad_words,
        "have_any",
        "sampling.bad_word_ids[..., -1] >= 0",
        "sampling.bad_word_ids[..., -1] >= 9",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_bans_on_the_path_are_caught(fault):
    with edited([Edit(*FAULTS[fault])]):
        assert wrong_laws()


def test_a_rejected_token_is_not_of_the_text_that_bans_follow():
    """After a rejection in place 1 the output ends with the accepted and the bonus token."""
    history = jax.tree.map(jnp.asarray, empty_history(2, VOCAB))
    tokens = jnp.array([[1, 2, 3], [1, 2, 3]])
    outcome = chain_outcome(jnp.array([1, 3]), jnp.array([4, 4]))
    live = jnp.array([True, True])
    after = verification.commit(history, point_mass(tokens, jnp.array([3, 3])), outcome, live)
    assert after.recent[:, -4:].tolist() == [[-1, -1, 1, 4], [1, 2, 3, 4]]
    idle = verification.commit(history, point_mass(tokens, jnp.array([3, 3])), outcome, ~live)
    assert (idle.recent == -1).all()


def test_a_draft_says_the_q_of_the_law_without_the_banned_tokens():
    logits = np.random.default_rng(1).normal(0, 1, (2, VOCAB)).astype(np.float32)
    settings = {"bad_word_ids": words((1, 3), (0,))}
    history = history_of(np.zeros((2, VOCAB), bool), np.zeros((2, VOCAB), np.int32), [[1], [2]])
    drawn = drafting.draw(
        jnp.asarray(logits), rows(settings, settings), jnp.array([4, 4]), jnp.array(0),
        lambda: history, tokens=VOCAB, support=VOCAB,
    )  # fmt: skip
    for row, output in enumerate(([1], [2])):
        law = next_law(logits[row], settings, [], output)
        np.testing.assert_allclose(drawn.q[row], law, atol=1e-6)
        assert law[drawn.token[row]] > 0


EVERY = words((0,), (1,), (0, 2), (1, 2))


@pytest.mark.parametrize("variant", ["any", "full"])
@pytest.mark.parametrize("rule", ["ratio", "block", "coupled"])
def test_where_every_token_is_banned_none_is_drawn(variant, rule):
    logits = np.zeros((3, 3, VOCAB), np.float32)
    settings = {"bad_word_ids": EVERY}
    of_rows = [settings, settings | {"temperature": 0.0}, {}]
    history = history_of(np.zeros((3, 3), bool), np.zeros((3, 3), np.int32), [[2], [2], [2]])
    # Only 2 may be said, after a 0 nothing.
    proposal = Proposal(
        np.array([[2, 0]] * 3, np.int32), np.full(3, 2, np.int32),
        np.array([[[2], [0]]] * 3, np.int32), np.full((3, 2, 1), 1e-3, np.float32),
    )  # fmt: skip

    def verify(logits, proposal, sampling, history):
        start = jnp.full(3, 7)
        return verification.verify(
            logits[..., :3], proposal, sampling, start, history, tokens=3, rule=rule,
            parts=VARIANTS[variant],
        )  # fmt: skip

    run = jax.jit(verify, compiler_options=QUICKLY)
    outcome = run(logits, proposal, rows(*of_rows), history)
    assert outcome.bonus[:2].tolist() == [2, 2]  # in place of the 0
    behind_a_0 = history_of(np.zeros((3, 3), bool), np.zeros((3, 3), np.int32), [[0], [0], [0]])
    outcome = run(logits, proposal, rows(*of_rows), behind_a_0)
    assert outcome.accepted[:2].tolist() == [0, 0]
    assert outcome.bonus[:2].tolist() == [NO_TOKEN] * 2
    assert outcome.bonus[2] != NO_TOKEN
    behind_a_2 = [one | {"bad_word_ids": words((0,), (1,), (2, 2))} for one in of_rows[:2]]
    outcome = run(logits, proposal, rows(*behind_a_2, {}), behind_a_0)
    assert outcome.accepted[:2].tolist() == [1, 1]
    assert outcome.bonus[:2].tolist() == [NO_TOKEN] * 2


def test_words_have_the_room_that_is_promised():
    assert words(range(MAX_BAD_WORD_TOKENS))[0].tolist() == list(range(MAX_BAD_WORD_TOKENS))
