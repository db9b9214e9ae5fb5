"""Rounds of SSD on scripted roles: what is looked up, proposed, prepared and counted."""

import dataclasses

import numpy as np
import pytest

from ssd_jax.engine.requests.metrics import RowLookup, row_lookup
from ssd_jax.roles.records import BranchTokens, SlotOpening
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.speculation.acceptance import AcceptanceStats
from ssd_jax.speculation.backup import NgramBackup, RandomBackup
from ssd_jax.speculation.controller import Controller
from ssd_jax.speculation.fan_out import ListedFanOut
from ssd_jax.testing.by_row import DraftRow, batch_of
from tests.engine.letters import LONG, drain, outputs, request, spell
from tests.fakes.branching import FakeBranchingDraft
from tests.speculation.watched import EOS, TOKENS, ssd


def write(text=LONG, *, params=None, **settings):
    """One request, whose text begins at position 3: its output, and the parts."""
    parts = ssd(spell(text), **settings)
    parts.engine.add(request(**{"max_tokens": 100} | (params or {})))
    (output,) = outputs(drain(parts.engine)).values()
    return output, parts


def never(prompt, position):
    return None


def only(*positions):
    return lambda prompt, position: 0 if position in positions else None


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_draft_that_is_always_right_hits_from_the_first_token_on(k):
    output, parts = write(k=k)
    assert output.text == LONG
    assert output.metrics["hit_rate"] == 1
    # The branch of k = L starts a forward later: K - 1 tokens, and the bonus token.
    assert set(parts.controller.lengths()) == {k - 1}
    assert parts.target.calls.count("forward") == -(-len(LONG) // k)


@pytest.mark.parametrize(("k", "draft_k"), [(1, 1), (3, 3), (2, 4)])
def test_one_forward_more_gives_that_branch_a_token_more(k, draft_k):
    output, parts = write(k=k, draft_k=draft_k, longer=True, params={"max_tokens": 41})
    assert output.text == LONG[:41]
    assert output.metrics["hit_rate"] == 1
    assert set(parts.controller.lengths()) == {k}
    assert parts.draft.expansions[0].forwards == k + 1
    assert max(expansion.forwards for expansion in parts.draft.expansions) == k + 1


@pytest.mark.parametrize("k", [1, 2])
def test_branches_of_a_request_with_shorter_proposals_take_no_more_forwards_than_these(k):
    parts = ssd(spell(LONG), k=4)
    parts.engine.add(dataclasses.replace(request(max_tokens=30), k=k))
    (output,) = outputs(drain(parts.engine)).values()
    assert output.text == LONG[:30]
    assert max(parts.controller.lengths()) == k
    assert {expansion.forwards for expansion in parts.draft.expansions[1:]} <= {1, k + 1}


@pytest.mark.parametrize("wrong", [2, 3, 5])
def test_a_draft_of_more_tokens_serves_fewer(wrong):
    settings = {"wrong": lambda position: position % wrong == 0, "backup": "draft"}
    output, parts = write(k=2, draft_k=5, **settings)
    assert output.text == LONG
    assert max(parts.controller.lengths()) == 2
    assert {expansion.forwards for expansion in parts.draft.expansions} == {2}
    assert parts.controller.lengths() == write(k=2, **settings)[1].controller.lengths()


def test_the_outcome_of_the_prompt_is_the_first_token():
    output, parts = write(rank=only(3))
    assert parts.controller.sources() == ["hit"] + ["miss"] * (len(LONG) - 3)
    assert output.text == LONG


@pytest.mark.parametrize("k", [1, 2, 4])
def test_without_hits_the_backup_draft_drafts_every_proposal(k):
    output, parts = write(k=k, rank=never, backup="draft")
    assert output.text == LONG
    assert output.metrics["hit_rate"] == 0
    assert output.metrics["acceptance_length_on_hit"] is None
    assert set(parts.controller.lengths()) == {k}
    assert parts.draft.drafted == [{0: k}] * len(parts.controller.rounds)


def test_backups_of_the_host_propose_and_the_draft_follows():
    text = "A again and again and again and B again"
    names, params = ("none", "ngram", "random"), {"seed": 9, "index": 5}
    parts = {name: write(text, params=params, rank=never, backup=name)[1] for name in names}
    ngram = NgramBackup()
    ngram.extend([*request().prompt_ids])
    rows = [rows[0] for rows, _ in parts["ngram"].controller.rounds]
    for (_, drafted), row in zip(parts["ngram"].controller.rounds, rows, strict=True):
        ngram.extend(row.committed)
        found = drafted.tokens[0, : drafted.lengths[0]].tolist()
        assert found == ngram.propose(row.position, row.limit)
    assert 3 in parts["ngram"].controller.lengths()
    rows, drafted = parts["random"].controller.rounds[4]
    assert drafted.tokens[0].tolist() == RandomBackup(9, 5, TOKENS).propose(rows[0].position, 3)
    assert set(parts["none"].controller.lengths()) == {0}
    for name, part in parts.items():
        assert not part.draft.drafted
        assert any(expansion.follow[0] for expansion in part.draft.expansions) == (name != "none")


def test_after_nothing_was_proposed_all_branches_are_for_the_next_token():
    """The eighth candidate then has a branch, which after a proposal it has not."""
    output, parts = write(rank=lambda prompt, position: 7, k=2, budget=8)
    assert output.text == LONG
    counts = [expansion.counts[0] for expansion in parts.draft.expansions]
    assert counts[:5] == [(8,), (4, 4), (8,), (4, 4), (8,)]
    assert parts.controller.sources()[:4] == ["hit", "miss", "hit", "miss"]


class FixedCounts:
    """Lists that note what was observed."""

    reads_confidence = False

    def __init__(self, **lists):
        self.counts = ListedFanOut(**lists).counts
        self.observed = []

    def observe(self, verified):
        self.observed.append(tuple(verified[:5]))


def test_rounds_with_a_rejected_token_and_a_miss_worked_out_by_hand():
    policy = FixedCounts(hit=(1, 1, 1, 1), miss=(1, 1, 0, 2))
    output, parts = write(
        params={"max_tokens": 16},
        fan_out=policy,
        budget=4,
        backup="draft",
        wrong=lambda position: position == 7,
        rank=lambda prompt, position: None if position == 11 else 0,
    )
    assert output.text == LONG[:16]
    # Position 3 by the prefill; 4 5 and 6; 7 for a wrong one; 8 9 10 and 11, which no branch was
    # for; 12 13 14 drafted just in time, and 15; 16 17 and 18, which is the last.
    assert parts.controller.lengths() == [2, 2, 3, 3, 2]
    assert parts.controller.sources() == ["hit", "hit", "hit", "miss", "hit"]
    assert policy.observed == [
        (0, 0, "miss", 4, 0),  # the prompt
        (2, 2, "hit", 2, 0),
        (0, 2, "hit", 1, 0),
        (3, 3, "hit", 1, None),
        (3, 3, "miss", 2, 0),
    ]
    assert [expansion.counts[0] for expansion in parts.draft.expansions] == [
        (4,),
        (1, 1, 2),
        (1, 1, 2),
        (1, 1, 1, 1),
        (1, 1, 0, 2),
        (3, 0, 1),  # of three more tokens, only one leaves room for another proposal
    ]
    assert parts.draft.drafted == [{0: 3}]
    assert [moved.winner for (moved,) in parts.draft.moves] == [-1, 0, 2, 0, -1, 2]
    metrics = output.metrics
    assert (metrics["hit_rate"], metrics["miss_causes"]) == (4 / 5, {"miss": 1})
    assert metrics["acceptance_length_on_hit"] == pytest.approx((3 + 1 + 4 + 3) / 4)
    assert metrics["acceptance_length_on_miss"] == 4


def test_ranks_are_observed_also_where_nothing_was_proposed():
    policy = FixedCounts(hit=(2, 2), miss=(2, 2))
    write(fan_out=policy, k=1, budget=4, rank=lambda prompt, position: position)
    assert policy.observed[:3] == [
        (0, 0, "miss", 4, 3),
        (0, 0, "hit", 4, None),
        (0, 0, "miss", 4, None),
    ]


def test_branches_that_were_not_heard_of_are_not_observed_as_prepared():
    """Absent ones say nothing about where the bonus token would have been."""
    policy = FixedCounts(hit=(1, 1, 1, 1), miss=(1, 1, 0, 2))
    parts = ssd(spell(LONG), fan_out=policy, budget=4)
    branch_tokens = parts.draft.branch_tokens
    parts.draft.branch_tokens = lambda *args: branch_tokens(*args) and "late"
    parts.engine.add(request([72], max_tokens=12))
    drain(parts.engine)
    assert len(policy.observed) > 5
    assert {observed[3:] for observed in policy.observed} == {(0, None)}


class Confident(FixedCounts):
    """Notes the confidence that it was given, by the record's length."""

    reads_confidence = True

    def __init__(self, **lists):
        super().__init__(**lists)
        self._counts, self.given = self.counts, []
        self.counts = self.noting

    def noting(self, length, budget, after, confidence=()):
        self.given.append((length, tuple(confidence)))
        return self._counts(length, budget, after)

    def observe(self, verified):
        self.observed.append((verified.length, tuple(verified.confidence)))


@pytest.mark.parametrize("backup", ["draft", "ngram"])
def test_a_fan_out_is_told_the_drafts_confidence_in_the_tokens_under_verification(backup):
    """Of branches with their news, of just-in-time drafts when asked for; of host tokens never."""
    policy = Confident(hit=(2, 1, 1, 2), miss=(2, 1, 1, 2))
    output, parts = write(
        fan_out=policy,
        budget=6,
        backup=backup,
        rank=lambda prompt, position: None if position % 4 == 1 else 0,
        confidence=lambda position: position % 8,
    )
    assert output.text == LONG
    expected, drafts = [], 0
    for rows, drafted in parts.controller.rounds:
        begin, length = rows[0].position + 1, int(drafted.lengths[0])
        known = drafted.sources[0] == "hit" or backup == "draft"
        confidence = [at % 8 for at in range(begin, begin + length)] if known else []
        expected.append((length, tuple(confidence)))
        drafts += drafted.sources[0] != "hit" and length > 0
    assert policy.observed == [(0, ()), *expected][: len(policy.observed)]
    planned = (3, ())  # D of Saguaro sampling is planned before there are tokens
    assert {entry for entry in policy.given if entry[0] == 3} <= {*expected, planned}
    assert sum(entry in expected and entry != planned for entry in policy.given) > 5
    assert drafts > 0
    assert parts.draft.calls.count("confidence") == (drafts if backup == "draft" else 0)


def test_the_targets_forward_gets_tokens_that_the_host_knows_without_the_draft():
    """It does not wait for a promotion, but for tokens that are drafted just in time."""
    asked = []

    class Silent(FakeBranchingDraft):
        def tokens(self):
            asked.append(self.calls[-1])
            return super().tokens()

    _, parts = write(draft=Silent, backup="draft", rank=only(3, 6))
    assert {"hit", "miss"} <= set(parts.controller.sources())
    asked = [call for call in asked if call != "proposal"]
    assert asked == ["draft"] * parts.draft.calls.count("draft")


def test_confidence_is_asked_for_only_where_the_fan_out_reads_it():
    _, parts = write(fan_out="measured", budget=6, backup="draft", rank=only(3, 6))
    assert "draft" in parts.draft.calls
    assert "confidence" not in parts.draft.calls


def test_saguaro_lowers_as_many_tokens_as_branches_are_planned():
    policy = ListedFanOut(hit=(3, 0, 1, 2), miss=(0, 0, 0, 6))
    _, parts = write(fan_out=policy, budget=6, draft_k=5, backup="draft", rank=only(3, 6))
    assert set.union(*(expansion.lowered for expansion in parts.draft.expansions)) == {
        (4, 1, 2, 0, 0)
    }


def test_a_smaller_budget_than_the_drafts_is_kept_to():
    output, parts = write(budget=3, branches=8, fan_out="geometric")
    assert output.text == LONG
    assert {sum(expansion.counts[0]) for expansion in parts.draft.expansions} == {3}


@pytest.mark.parametrize("backup", ["none", "draft"])
def test_a_round_moves_once_expands_once_and_drafts_only_for_rows_that_wait(backup):
    """K forwards on a hit."""
    parts = ssd(spell(LONG), k=3, backup=backup, rank=lambda prompt, position: position % 9)
    for size in (2, 7, 1, 5):
        parts.engine.add(request(range(65, 65 + size), max_tokens=30))
    seen = set()
    while parts.engine.has_work:
        calls, rounds = len(parts.draft.calls), len(parts.controller.rounds)
        parts.engine.step()
        called = [call for call in parts.draft.calls[calls:] if call not in ("open", "prefill")]
        proposed = parts.controller.rounds[rounds:]
        if proposed:
            waits = backup == "draft" and set(proposed[0][1].sources.values()) != {"hit"}
            assert called == [
                "branch_tokens",
                "promote",
                *["draft"] * waits,
                "expand",
                "proposal",
            ]
            seen.add(waits)
        else:  # a prompt has ended, or nothing has
            assert called in ([], ["branch_tokens"], ["promote", "expand"])
    assert seen == ({False, True} if backup == "draft" else {False})
    # Fewer where no sequence has room for three more.
    assert max(expansion.forwards for expansion in parts.draft.expansions) == 3
    assert [expansion.forwards for expansion in parts.draft.expansions[:9]] == [3] * 9


@pytest.mark.parametrize(
    ("tokens", "expanded"),
    [
        (9, [((8,), 3), ((3, 3, 2), 3), ((3, 3, 2), 3)]),
        (8, [((8,), 3), ((3, 3, 2), 3), ((4, 3, 1), 2)]),
        (3, [((8,), 2)]),
        (2, []),
        (1, []),
    ],
)
def test_the_tree_shrinks_with_the_room_that_is_left(tokens, expanded):
    """A branch whose outcome leaves no room for a proposal is none; but s_L is run."""
    output, parts = write(params={"max_tokens": tokens}, k=3, budget=8)
    assert output.text == LONG[:tokens]
    found = [(expansion.counts[0], expansion.forwards) for expansion in parts.draft.expansions]
    assert found == expanded


@pytest.mark.parametrize("limits", [{"max_tokens": 12}, {"context": 15, "max_tokens": 99}])
def test_proposals_leave_room_for_the_bonus_token_alone(limits):
    context, params = limits.get("context", 64), {"max_tokens": limits["max_tokens"]}
    for backup, rank, lengths in [
        ("none", lambda prompt, position: 0, [7, 2]),
        ("draft", never, [8, 1]),
    ]:
        output, parts = write(
            "x" * 99, k=8, params=params, context=context, backup=backup, rank=rank
        )
        assert (len(output.token_ids), output.finish_reason) == (12, "length")
        assert parts.controller.lengths() == lengths


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_where_no_cache_was_looked_up_its_figures_do_not_apply(max_tokens):
    output, parts = write(params={"max_tokens": max_tokens})
    assert output.text == LONG[:max_tokens]
    assert not parts.controller.rounds
    for name in (
        "hit_rate",
        "acceptance_length_on_hit",
        "acceptance_length_on_miss",
        "miss_causes",
    ):
        assert output.metrics[name] is None


def test_figures_of_the_cache_end_where_the_text_ends():
    """Rounds of three tokens; nothing is prepared for what follows the b of brown."""
    output, parts = write(
        params={"stop": "rown"}, rank=lambda prompt, position: 0 if position < 14 else None
    )
    assert output.text == "the quick b"
    assert "miss" in parts.controller.sources()
    assert output.metrics["acceptance_histogram"] == [1, 0, 3]
    assert (output.metrics["hit_rate"], output.metrics["miss_causes"]) == (1, {})
    assert output.metrics["acceptance_length_on_hit"] == pytest.approx(10 / 4)
    assert output.metrics["acceptance_length_on_miss"] is None


def test_an_end_that_the_draft_proposes_and_the_target_rejects_ends_nothing():
    def drafted(prompt, position):
        return EOS if position % 3 == 0 else spell(LONG)(prompt, position)

    def make(script, **settings):
        return FakeBranchingDraft(drafted, **settings)

    output, parts = write(draft=make, backup="draft")
    assert output.text == LONG
    assert any(EOS in drafted.tokens[0] for _, drafted in parts.controller.rounds[:3])


@pytest.mark.parametrize("settings", [{}, {"rank": only(3, 4, 9, 20)}, {"backup": "draft"}])
def test_look_ups_by_k_and_by_rank_add_up(settings):
    metrics = write(k=3, wrong=lambda position: position % 4 == 0, **settings)[0].metrics
    hits, looks = (sum(column) for column in zip(*metrics["hit_rate_by_k"], strict=True))
    assert hits / looks == pytest.approx(metrics["hit_rate"])
    assert looks == hits + sum(metrics["miss_causes"].values())
    assert sum(found for found, _ in metrics["hit_rate_by_rank"]) == hits
    assert metrics["wasted_draft_tokens"] > 0


def controller_of(answer):
    """One slot, whose prompt is known and whose branches are `answer` (or why there are none)."""
    parts = ssd(spell(LONG), k=2, slots=1, budget=4)
    controller, draft = parts.controller, parts.draft
    controller.open(SlotOpening(0, request().params))
    controller.prefill(0, [65, 66, 67], 0, last=True)
    controller.speculate()
    draft.branch_tokens = lambda forwards, until=None: answer
    draft.promote = lambda promotion: None
    return controller


def branches(bonus, lengths):
    tokens = np.arange(40, 48, dtype=np.int32).reshape(1, 4, 2)
    parts = (np.array([part], np.int32) for part in (bonus, lengths))
    return BranchTokens(*parts, tokens, np.full(tokens.shape, UNKNOWN, np.int32), 2)


def looked_up(controller, row):
    drafted = Controller.propose(controller, batch_of([row], 1))
    length = int(drafted.lengths[0])
    return drafted.sources[0], length, row_lookup(drafted.lookup, 0, length)


def test_look_ups_name_k_rank_and_the_tokens_that_did_not_win():
    controller = controller_of(branches([10, 11, 12, -1], [2, 2, 1, 0]))
    # Three branches of k = 0 with 5 tokens; the second one comes true, limited to one token.
    row = DraftRow(0, 3, [11], 1)
    assert looked_up(controller, row) == ("hit", 1, RowLookup(0, 3, 1, 4))
    # Told again after an interruption, it is counted once, and its branches are gone.
    assert looked_up(controller, row) == ("cold", 0, None)


def test_an_outcome_without_a_branch_is_a_miss_and_all_tokens_are_wasted():
    controller = controller_of(branches([10, 11, 12, -1], [2, 2, 1, 0]))
    assert looked_up(controller, DraftRow(0, 3, [9], 2)) == ("miss", 0, RowLookup(0, 3, None, 5))


@pytest.mark.parametrize("absence", ["late", "stale", "dead"])
def test_where_no_branches_came_the_look_up_says_why(absence):
    controller = controller_of(absence)
    assert looked_up(controller, DraftRow(0, 3, [9], 2)) == (absence, 0, RowLookup(0, 0, None, 0))


def test_what_a_sequence_learns_of_its_proposals_is_what_its_metrics_say(monkeypatch):
    seen, observe = [], AcceptanceStats.observe

    def noted(self, accepted, length, confidence):
        seen.append((accepted, length))
        observe(self, accepted, length, confidence)

    monkeypatch.setattr(AcceptanceStats, "observe", noted)
    parts = ssd(spell(LONG), wrong=lambda position: position % 5 == 3, backup="draft")
    parts.engine.add(request(max_tokens=40))
    (output,) = outputs(drain(parts.engine)).values()
    assert {accepted for accepted, _ in seen} >= {0, 1, 2, 3}
    assert all(accepted <= length for accepted, length in seen)
    # Nothing is learned of the last round, which no other follows, nor of one without a proposal.
    histogram = np.bincount([accepted for accepted, _ in seen], minlength=4)
    left = np.array(output.metrics["acceptance_histogram"]) - histogram
    assert left.min() >= 0
    assert left.sum() <= 1 + parts.controller.lengths().count(0)
