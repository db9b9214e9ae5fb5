"""Branches of speculation records: what they say, and what they cost."""

import itertools

import numpy as np
import pytest

from ssd_jax.testing import tiny
from tests.devices.branches.plain_draft import (
    Speculation,
    allowed,
    assert_as_plain,
    assert_likeliest,
)
from tests.devices.branches.script import (
    HOSTED,
    LOWERED,
    OF_ONE_TOKEN,
    SLOTS,
    K,
    M,
    branches,
    compiled,
    length,
    record,
    scripted,
)


def test_the_script_has_records_of_every_kind_and_length(script):
    _, rounds, longer = script
    known = {(seen.sources[slot], length(seen, slot)) for seen in rounds for slot in seen.texts}
    assert known >= {("prompt", 0), ("none", 0), ("draft", 1), ("draft", K - 1), ("draft", K)}
    assert known >= {("host", 1), ("host", 2), ("host", K - 1), ("host", K)}
    assert known >= {("hit", 1), ("hit", K), ("hit", 2 if longer else K - 1)}
    assert any(len(seen.texts) < SLOTS for seen in rounds)


def test_records_say_what_a_plain_draft_says(script):
    """Tokens, laws and candidates after a hit and just in time; of host tokens the candidates."""
    draft, rounds, _ = script
    found = [(seen, record(seen, slot)) for seen in rounds for slot in seen.texts]
    for (seen, one), run in zip(
        found, draft.plain([one.sequence for _, one in found]), strict=True
    ):
        lowered = LOWERED if seen.sources[one.index] in ("hit", "draft") else None
        assert_as_plain(one, run, lowered=lowered, c=draft.c)
        if one.support is None:
            assert one.tokens == HOSTED[: len(one.tokens)]
            np.testing.assert_array_equal(seen.record.proposal.q[one.index, :, 0], 1)


def test_a_hit_makes_the_branch_the_record_up_to_its_limit(script):
    _, rounds, _ = script
    for before, seen in itertools.pairwise(rounds):
        for slot, move in seen.moves.items():
            assert seen.record.start[slot] == move.position
            assert seen.record.pending[slot] == move.pending
            if move.winner >= 0:
                now, row = record(seen, slot), slot * before.budget + move.winner
                won = Speculation.of(before.expansion.records, row, now.request, slot, now.text)
                size = min(len(won.tokens), move.limit)
                assert now.tokens == won.tokens[:size]
                for field in ("support", "q", "candidates"):
                    np.testing.assert_array_equal(getattr(now, field), getattr(won, field)[:size])


def test_branches_start_with_the_likeliest_bonus_tokens(script):
    """Of k < L the candidates c_k without the proposed token; of k = L those after s_L."""
    draft, rounds, _ = script
    found = [(seen, slot, record(seen, slot)) for seen in rounds for slot in seen.texts]
    runs = draft.plain([one.sequence for *_, one in found])
    for (seen, slot, one), run in zip(found, runs, strict=True):
        expected = seen.branches(slot)
        after_last = [number for number, k, _ in expected if k == len(one.tokens)]
        scores = allowed(run.logits[-1], one.request, one.sequence)
        assert_likeliest(seen.on_host.bonus[slot, after_last], scores)
        for number, k, rank in expected:
            if k < len(one.tokens):
                others = [c for c in one.candidates[k].tolist() if c != one.tokens[k]]
                assert seen.on_host.bonus[slot, number] == others[rank]
            row = slot * seen.budget + number
            assert seen.expansion.records.start[row] == len(one.text) + k
            assert seen.expansion.records.pending[row] == seen.on_host.bonus[slot, number]
            path = seen.expansion.path[row].tolist()
            assert [token for token in path if token >= 0] == [
                *one.tokens[:k],
                seen.on_host.bonus[slot, number],
            ]
            assert path[-1] == seen.on_host.bonus[slot, number]


def test_branches_say_what_a_plain_draft_says_after_their_whole_text(script):
    draft, rounds, _ = script
    found = [one for seen in rounds for slot in seen.texts for *_, one in branches(seen, slot)]
    assert len(found) > 100
    for one, run in zip(found, draft.plain([one.sequence for one in found]), strict=True):
        assert_as_plain(one, run, lowered=LOWERED, c=draft.c)


def test_branches_of_accepted_records_start_one_forward_later(script):
    _, rounds, longer = script
    for seen in rounds:
        for slot in seen.texts:
            for number, k, _ in seen.branches(slot):
                late = k == length(seen, slot) and not longer
                assert seen.on_host.lengths[slot, number] == K - late


def test_rows_without_a_branch_have_bonus_minus_one(script):
    _, rounds, _ = script
    for seen in rounds:
        used = seen.counts.sum(1)[:, None] > np.arange(M)
        np.testing.assert_array_equal(seen.on_host.bonus >= 0, used)
        held = seen.expansion.records.start.reshape(SLOTS, seen.budget) >= 0
        np.testing.assert_array_equal(held, used[:, : seen.budget])
        assert not seen.on_host.lengths[~used].any()
        idle = [slot for slot in range(SLOTS) if slot not in seen.texts]
        assert (seen.followed.start[idle] == -1).all()


def test_the_host_hears_what_the_branches_hold(script):
    _, rounds, _ = script
    for seen in rounds:
        proposal = seen.expansion.records.proposal
        on_host = [array[:, : seen.budget] for array in (seen.on_host.tokens, seen.on_host.lengths)]
        np.testing.assert_array_equal(on_host[0].reshape(-1, K), proposal.tokens)
        np.testing.assert_array_equal(on_host[1].reshape(-1), proposal.length)


def test_a_round_costs_k_forwards_after_hits(script):
    """One more to lengthen, one more for host tokens; just-in-time drafts as many as they have."""
    _, rounds, longer = script
    for seen in rounds:
        drafted = [length(seen, slot) for slot in seen.texts if seen.sources[slot] == "draft"]
        drafting, expanding = seen.forwards
        assert len(drafting) == max(drafted, default=0)
        hosted = "host" in seen.sources.values()
        assert expanding == [K] * hosted + [seen.budget] * (K + longer)
    only_hits = [seen for seen in rounds if set(seen.sources.values()) == {"hit"}]
    assert only_hits
    assert all(seen.forwards == ([], [seen.budget] * (K + longer)) for seen in only_hits)


@pytest.fixture(scope="module")
def draft_of_one_token(tmp_path_factory):
    return compiled(tiny.write_checkpoint(tmp_path_factory.mktemp("one") / "qwen3", "qwen3"), k=1)


@pytest.mark.parametrize("longer", [False, True])
def test_a_draft_of_one_token_a_round_says_what_a_plain_draft_says(draft_of_one_token, longer):
    """Its branches of k = L have a token only after one forward more."""
    rounds = draft_of_one_token.rounds(
        longer=longer, fan_out=lambda _slot, length: ((M,), (3, M - 3))[length]
    )
    rounds = scripted(rounds, script=OF_ONE_TOKEN)
    script = draft_of_one_token, rounds, longer
    known = {(seen.sources[slot], length(seen, slot)) for seen in rounds for slot in seen.texts}
    assert known >= {("prompt", 0), ("draft", 1), ("host", 1), ("hit", 0), ("hit", 1)}
    test_records_say_what_a_plain_draft_says(script)
    test_a_hit_makes_the_branch_the_record_up_to_its_limit(script)
    test_branches_start_with_the_likeliest_bonus_tokens(script)
    test_branches_say_what_a_plain_draft_says_after_their_whole_text(script)
