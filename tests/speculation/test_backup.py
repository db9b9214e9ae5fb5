"""What a sequence that misses proposes without waiting for the draft."""

from __future__ import annotations

import numpy as np
import pytest

from ssd_jax.speculation.backup import KINDS, Backup, NgramBackup, RandomBackup, make
from ssd_jax.speculation.ngram import NgramIndex
from tests.sampling.evidence import ALPHA, p_value

TOKENS = 49152


def test_without_a_backup_nothing_is_proposed():
    backup = Backup()
    backup.extend([1, 2, 1, 2])
    assert backup.propose(3, 4) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_backup_of_the_flag_can_be_made(kind):
    assert isinstance(make(kind, 0, 0, TOKENS), Backup)


def test_ngrams_are_looked_up_in_prompt_and_output():
    backup = NgramBackup()
    backup.extend([1, 2, 3, 4])  # the prompt
    backup.extend([9, 2])
    assert backup.propose(5, 2) == [3, 4]
    backup.extend([3, 7, 9, 2])
    assert backup.propose(9, 2) == [3, 7]
    assert NgramBackup().propose(0, 4) == []


def test_ngrams_are_those_of_the_ngram_draft():
    backup, index, rng = NgramBackup(), NgramIndex(), np.random.default_rng(0)
    size = 0
    for _ in range(60):
        more = rng.integers(0, 4, rng.integers(1, 6)).tolist()
        backup.extend(more)
        index.extend(more)
        size += len(more)
        assert backup.propose(size - 1, 6) == index.propose(6)


def test_random_ids_are_the_same_for_the_same_start_whatever_came_before():
    fresh, used = RandomBackup(7, 3, TOKENS), RandomBackup(7, 3, TOKENS)
    used.extend([1, 2, 3])
    used.propose(40, 8)
    assert used.propose(41, 8) == fresh.propose(41, 8) == fresh.propose(41, 8)
    assert fresh.propose(41, 3) == fresh.propose(41, 8)[:3]


def test_random_ids_are_pinned():
    """A seed gives the same text on every machine and with every NumPy."""
    assert RandomBackup(1, 2, TOKENS).propose(3, 6) == [6749, 11070, 12544, 41138, 31223, 6638]
    assert RandomBackup(2**64 - 1, 0, TOKENS).propose(0, 2) == [11547, 35257]


def test_seed_request_and_start_each_give_other_ids():
    draws = {
        tuple(RandomBackup(seed, request, TOKENS).propose(start, 4))
        for seed in (0, 1, 2**63)
        for request in (0, 1, 2)
        for start in (0, 1, 2, 1000)
    }
    assert len(draws) == 3 * 3 * 4


def test_draws_of_neighbouring_starts_do_not_overlap():
    backup = RandomBackup(0, 0, TOKENS)
    texts = [backup.propose(start, 40) for start in range(8)]
    windows = {tuple(text[at : at + 2]) for text in texts for at in range(39)}
    assert len(windows) == 8 * 39


@pytest.mark.parametrize("tokens", [1, 3, 10, TOKENS])
def test_random_ids_are_below_the_number_of_tokens(tokens):
    ids = [i for s in range(200) for i in RandomBackup(5, s, tokens).propose(s, 8)]
    assert all(type(i) is int for i in ids)
    assert min(ids) >= 0
    assert max(ids) < tokens


def test_random_ids_are_uniform_and_independent_of_their_neighbours():
    size, draws = 6, 12_000
    pairs = np.array([RandomBackup(0, n, size).propose(5, 2) for n in range(draws)])
    seen = np.zeros((size, size))
    np.add.at(seen, (pairs[:, 0], pairs[:, 1]), 1)
    assert p_value(seen, np.full((size, size), size**-2.0)) > ALPHA


def test_each_kind_of_backup_is_made():
    assert type(make("none", 0, 0, TOKENS)) is Backup
    assert isinstance(make("ngram", 0, 0, TOKENS), NgramBackup)
    made = make("random", 5, 6, TOKENS)
    assert made.propose(7, 8) == RandomBackup(5, 6, TOKENS).propose(7, 8)
