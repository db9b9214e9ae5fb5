"""Promoting a branch: the draft's pages and counts are those of a draft that saw the text."""

import itertools
from typing import Any

import numpy as np
import pytest

from ssd_jax.devices.branches import draft as branch_draft
from ssd_jax.testing import tiny
from tests.devices.branches.plain_draft import assert_as_plain
from tests.devices.branches.rounds import ALL, Outcome, Request, Seen
from tests.devices.branches.script import (
    CONTEXT,
    FAN_OUTS,
    HOSTED,
    LOWERED,
    REQUESTS,
    SCRIPTS,
    SLOTS,
    K,
    M,
    branches,
    length,
    record,
    scripted,
)
from tests.sampling.edits import Edit, edited


def test_pages_hold_the_text_and_the_record_as_after_a_plain_prefill(script):
    """Whatever branch was promoted, the tail's token and host tokens included."""
    draft, rounds, _ = script
    found = [(seen, record(seen, slot)) for seen in rounds for slot in seen.texts]
    for (seen, one), run in zip(
        found, draft.plain([one.sequence for _, one in found]), strict=True
    ):
        start, size = len(one.text) - 1, len(one.tokens)
        drawn = one.support is not None
        known = start + size if drawn else start
        for pages, count in ((seen.moved, known), (seen.grown, start + size + 1)):
            found_pages = pages[:, one.index, :, :count]
            np.testing.assert_allclose(found_pages, run.kv[:, :, :count], rtol=1e-3, atol=1e-5)


def test_tokens_that_the_draft_did_not_make_are_point_masses(script):
    _, rounds, _ = script
    hosted = [(seen, slot) for seen in rounds for slot in seen.texts if seen.moves[slot].tokens]
    assert hosted
    for seen, slot in hosted:
        tokens, size, support, q = (field[slot] for field in seen.record.proposal)
        assert size == len(seen.moves[slot].tokens)
        assert (support[:size, 0] == tokens[:size]).all()
        assert (support[:size, 1:] == -1).all()
        np.testing.assert_array_equal(q[:size], np.eye(1, q.shape[-1]).repeat(size, axis=0))


def test_an_expansion_writes_to_the_pages_only_what_the_record_lacked(script):
    """The last proposed token, and those the draft did not make: all else keeps its bits."""
    _, rounds, _ = script
    for seen in rounds:
        changed = (seen.moved != seen.grown).any(axis=(0, 2, 4))
        for slot in range(SLOTS):
            lacked = set()
            if slot in seen.texts:
                start = len(seen.texts[slot]) - 1
                last = start + length(seen, slot)
                lacked = set(range(start, last + 1)) if seen.sources[slot] == "host" else {last}
            assert set(np.flatnonzero(changed[slot])) <= lacked


def test_a_promotion_writes_to_the_pages_only_the_record(script):
    _, rounds, _ = script
    for before, seen in itertools.pairwise(rounds):
        changed = (before.grown != seen.moved).any(axis=(0, 2, 4))
        for slot in range(SLOTS):
            source = seen.sources.get(slot)
            if source in ("hit", "draft"):
                start = len(seen.texts[slot]) - 1
                expected = set(range(start, start + length(seen, slot)))
                assert set(np.flatnonzero(changed[slot])) == expected
            elif source != "prompt":
                assert not changed[slot].any()


def test_the_output_is_counted_once(script):
    _, rounds, _ = script
    for seen in rounds:
        for slot, text in seen.texts.items():
            output = text[len(seen.requests[slot].prompt) :]
            counts = np.bincount(np.array(output, int), minlength=tiny.ROWS)
            np.testing.assert_array_equal(seen.output[slot], counts)


@pytest.fixture(params=["unrolled_draft", "scanned_draft", "joined_draft"])
def draft(request):
    return request.getfixturevalue(request.param)


def of_slot(seen: Seen, slot: int) -> dict[str, Any]:
    """Everything that a draft holds of a slot, but for pages beyond its text."""
    end = len(seen.texts[slot]) + length(seen, slot)
    held: dict[str, Any] = {
        "moved": seen.moved[:, slot, :, : end - 1],
        "grown": seen.grown[:, slot, :, :end],
    }
    rows = slice(slot * M, (slot + 1) * M)
    held["path"] = seen.expansion.path[rows]
    for name, pages, at in (
        ("record", seen.followed, slice(slot, slot + 1)),
        ("branches", seen.expansion.records, rows),
    ):
        held |= {f"{name}.{field}": getattr(pages, field)[at] for field in ("start", "pending")}
        size = pages.proposal.length[at]
        held[f"{name}.length"] = size
        real = np.arange(K) < size[:, None]
        held[f"{name}.candidates"] = pages.candidates[at][real]
        for field in ("tokens", "support", "q"):
            held[f"{name}.{field}"] = getattr(pages.proposal, field)[at][real]
    return held


def test_a_slot_does_not_depend_on_the_others_to_the_bit(draft):
    """Neither on their records, branches and fan-outs nor on whether there are any."""
    together = scripted(draft.rounds())
    alone = scripted(draft.rounds(), slots=[1])
    swapped = {**SCRIPTS, 0: SCRIPTS[2], 2: SCRIPTS[0]}
    others = scripted(
        draft.rounds(fan_out=lambda slot, size: FAN_OUTS[2 - slot][size]),
        script=swapped,
    )
    for one, other, third in zip(together, alone, others, strict=True):
        expected = of_slot(one, 1)
        for found in (of_slot(other, 1), of_slot(third, 1)):
            for name, values in expected.items():
                np.testing.assert_array_equal(found[name], values, err_msg=name)


PROMOTED = "\n        self._pages, self._history,"
GROWN = "\n        self._pages, active.scratch"
FLAWS = {
    "promotes from the most branches": ("self._menu[-1]", PROMOTED),
    "promotes from the fewest": ("self._menu[0]", PROMOTED),
    "grows the most branches": ("self._menu[-1]", GROWN),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_taking_the_branches_of_another_budget_is_caught(scanned_draft, flaw):
    wrong, what = FLAWS[flaw]
    edit = Edit(
        branch_draft, "BranchDraft", f"active = self._active{what}", f"active = {wrong}{what}"
    )
    with edited([edit]), pytest.raises(AssertionError):
        check_rounds_of_two_budgets(scanned_draft)


def check_rounds_of_two_budgets(draft):
    """The script's own checks may see first that something is wrong."""
    rounds = scripted(draft.of_two_budgets())
    test_pages_hold_the_text_and_the_record_as_after_a_plain_prefill((draft, rounds, False))


def test_at_the_end_of_the_context_nothing_is_written_elsewhere(draft):
    """Records and branches that reach beyond the last position lose those tokens' keys only."""
    prompt = tuple(b"abcd" * (CONTEXT // 4))[: CONTEXT - 4]
    rounds = draft.rounds(fan_out=lambda slot, size: FAN_OUTS[0][size])
    rounds.run({0: REQUESTS[0], 1: Request(prompt, REQUESTS[1].params)})
    for how in (Outcome(0, rank=0), Outcome(0, hosted=HOSTED), Outcome(1, rank=0)):
        before = rounds.seen[-1].grown
        seen = rounds.run({0: Outcome(ALL, rank=0), 1: how})
        start, size = len(seen.texts[1]) - 1, length(seen, 1)
        changed = (before != seen.grown).any(axis=(0, 2, 4))
        assert set(np.flatnonzero(changed[1])) <= set(range(start, min(start + size + 1, CONTEXT)))
        begin = len(seen.texts[0]) - 1
        assert set(np.flatnonzero(changed[0])) <= set(range(begin, begin + length(seen, 0) + 1))
        assert not changed[2].any()
        all_pages = [one for k, _, one in branches(seen, 1) if start + k < CONTEXT]
        assert all_pages
        for one, run in zip(
            all_pages, draft.plain([one.sequence for one in all_pages]), strict=True
        ):
            assert_as_plain(one, run, lowered=LOWERED, c=draft.c)
    assert start == CONTEXT - 1
