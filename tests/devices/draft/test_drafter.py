"""The `model` drafter: its pages, its forwards, and what it remembers of a slot's last request."""

import dataclasses

import jax
import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.devices.draft.drafter import ModelDrafter
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.programs import passes
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.roles.drafting import Drafting
from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny
from ssd_jax.testing.by_row import DraftRow, batch_of
from tests.devices.branches.rounds import layered
from tests.models.golden import FLOAT32, parameters

SLOTS, K, CONTEXT, SUPPORT = 3, 4, 200, 8
PARAMS = SamplingParams(temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("drafter") / "qwen3", "qwen3")
    return open_checkpoint(str(path))


@pytest.fixture(scope="module")
def forwards():
    """One entry a model forward that ran, with how many tokens a row it had."""
    return []


@pytest.fixture(scope="module")
def loaded(checkpoint, forwards):
    """Programs that count the forwards they run, and the draft's parameters."""
    step = passes.step

    def counted(model, weights, pages, table, tokens, *rest):
        jax.debug.callback(lambda: forwards.append(tokens.shape[1]))
        return step(model, weights, pages, table, tokens, *rest)

    model = FunctionalModel(checkpoint.config, FLOAT32)
    drafting = Drafting(k=K, support=SUPPORT, rule="ratio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "step", counted)
        programs = DraftPrograms(
            model, slots=SLOTS, context=CONTEXT, tokens=tiny.TOKENS, drafting=drafting
        )
    return programs, parameters(checkpoint, model)


class Rounds:
    """Slots driven through a drafter as the engine would, the target's part played by a script.

    `accept(round, slot)` proposed tokens are kept in a round (at most L), then comes a bonus token.
    """

    def __init__(self, drafter, prompts, accept, *, params=PARAMS, slots=None):
        self.drafter, self.accept = drafter, accept
        self.slots = list(slots or range(len(prompts)))
        self.prompts = dict(zip(self.slots, prompts, strict=True))
        # The prompt's last forward has drawn a first token; it is pending.
        self.texts = {slot: [*self.prompts[slot], 7 + slot] for slot in self.slots}
        self.committed = {slot: len(self.prompts[slot]) for slot in self.slots}
        self.proposed = {slot: [] for slot in self.slots}
        self.accepted = []
        for slot in self.slots:
            drafter.open(SlotOpening(slot, params, slot))
            drafter.prefill(slot, self.prompts[slot], 0, last=True)

    def run(self, count, limit=lambda round_, slot: K, times=1):
        for round_ in range(count):
            rows = []
            for slot, text in self.texts.items():
                committed, self.committed[slot] = text[self.committed[slot] :], len(text)
                rows.append(DraftRow(slot, len(text) - 1, committed, limit(round_, slot)))
            batch = batch_of(rows, self.drafter._programs.slots)
            drafted = [self.drafter.propose(batch) for _ in range(times)][-1]
            tokens = np.asarray(drafted.tokens)
            lengths = np.asarray(self.drafter.proposal().length)
            np.testing.assert_array_equal(lengths, drafted.lengths)
            for slot, text in self.texts.items():
                proposed = tokens[slot, : drafted.lengths[slot]].tolist()
                self.proposed[slot].append(proposed)
                accepted = min(self.accept(round_, slot), len(proposed))
                self.accepted.append(accepted)
                text += [*proposed[:accepted], (11 * round_ + slot) % tiny.TOKENS]
        return self


def some_accepted(round_, slot):
    return (3 * round_ + 2 * slot) % (K + 1)


PROMPTS = [list(b"first prompt"), list(b"the second one is a bit longer. " * 4), [5]]


def cached(drafter, slot, count):
    """Keys and values of a slot's first positions, all layers."""
    return layered(drafter._pages, drafter.slots)[:, slot, :, :count]


@pytest.mark.more
def test_after_rounds_the_pages_are_those_of_a_plain_prefill_of_the_committed_text(loaded):
    """Whatever prefix was accepted is promoted by its length; what was rejected is overwritten."""
    drafter = ModelDrafter(*loaded)
    run = Rounds(drafter, PROMPTS, some_accepted).run(9)
    assert set(run.accepted) == set(range(K + 1))  # none, some and all of a proposal were kept
    plain = ModelDrafter(*loaded)
    for slot, text in run.texts.items():
        # Of the last round everything is promoted but the bonus token, and s_L if that was kept.
        known = min(drafter._cached[slot], len(text) - 1)
        assert known >= len(text) - 2
        tokens = text[len(run.prompts[slot]) : run.committed[slot]]
        counts = np.bincount(tokens, minlength=tiny.ROWS)
        np.testing.assert_array_equal(np.asarray(drafter._history.output)[slot], counts)
        plain.open(SlotOpening(slot, PARAMS, slot))
        plain.prefill(slot, text[:-1], 0, last=True)
        expected = cached(plain, slot, known)
        for found, wanted in zip(cached(drafter, slot, known), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        others = cached(
            plain, slot, known + 1
        )  # the comparison can tell one position from the next
        assert not np.allclose(others[0][:, 1:], expected[0][:, :1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("accepted", [0, 2, K])
def test_the_next_proposal_is_that_of_a_drafter_that_saw_the_text_at_once(loaded, accepted):
    run = Rounds(ModelDrafter(*loaded), PROMPTS, lambda *_: accepted).run(4)
    fresh = Rounds(ModelDrafter(*loaded), PROMPTS, lambda *_: 0)
    for slot, text in run.texts.items():
        fresh.drafter.open(SlotOpening(slot, PARAMS, slot))
        fresh.drafter.prefill(slot, text[:-1], 0, last=True)
        fresh.texts[slot], fresh.committed[slot] = list(text), len(text) - 1
    run.run(1)
    fresh.run(1)
    assert {slot: tokens[-1] for slot, tokens in run.proposed.items()} == {
        slot: tokens[0] for slot, tokens in fresh.proposed.items()
    }


@pytest.mark.parametrize("accepted", [0, 2, K])
def test_a_round_costs_as_many_forwards_as_tokens_proposed(loaded, forwards, accepted):
    """Also when the whole proposal was accepted and two committed tokens are unseen."""
    run = Rounds(ModelDrafter(*loaded), PROMPTS, lambda *_: accepted)
    for _ in range(3):
        jax.effects_barrier()
        forwards.clear()
        run.run(1)
        jax.effects_barrier()
        assert len(forwards) == K
        assert sorted(forwards) == [1] * (K - 1) + [2]


def test_short_proposals_cost_short_rounds(loaded, forwards):
    run = Rounds(ModelDrafter(*loaded), PROMPTS, some_accepted)
    forwards.clear()
    run.run(1, limit=lambda round_, slot: 1 + (slot == 1))
    jax.effects_barrier()
    assert len(forwards) == 2
    assert [len(run.proposed[slot][0]) for slot in run.slots] == [1, 2, 1]


def test_a_smaller_k_uses_the_programs_of_the_largest(loaded):
    drafter = ModelDrafter(*loaded, k=2)
    assert drafter.k == 2
    run = Rounds(drafter, PROMPTS, lambda round_, slot: round_ % 3)
    run.run(4, limit=lambda round_, slot: 2)
    of_largest = Rounds(ModelDrafter(*loaded), PROMPTS, lambda round_, slot: 0).run(1)
    assert all(run.proposed[slot][0] == of_largest.proposed[slot][0][:2] for slot in run.slots)


def test_tokens_told_twice_to_a_model_drafter_count_once(loaded):
    """A step that was interrupted tells its tokens again."""
    penalised = dataclasses.replace(PARAMS, repetition_penalty=1.5, frequency_penalty=2.0)
    once, twice = (
        Rounds(ModelDrafter(*loaded), PROMPTS, some_accepted, params=penalised) for _ in range(2)
    )
    assert once.run(5).proposed == twice.run(5, times=2).proposed
    for one, other in zip(once.drafter._history, twice.drafter._history, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_reused_slot_proposes_as_a_fresh_one(loaded):
    """Neither pages, history nor lengths of the last request reach the next one."""
    penalised = dataclasses.replace(PARAMS, repetition_penalty=1.5, presence_penalty=2.0)
    used = ModelDrafter(*loaded)
    Rounds(used, PROMPTS[::-1], some_accepted, params=penalised).run(6)
    again = Rounds(used, PROMPTS, some_accepted, params=penalised).run(5)
    fresh = Rounds(ModelDrafter(*loaded), PROMPTS, some_accepted, params=penalised).run(5)
    assert again.proposed == fresh.proposed
    assert again.texts == fresh.texts


def test_a_slot_changes_hands_while_its_neighbours_go_on(loaded):
    drafter = ModelDrafter(*loaded)
    both = Rounds(drafter, PROMPTS[:2], some_accepted).run(3)
    # Slot 0 ends with proposals in its pages; a shorter request takes it.
    Rounds(drafter, [PROMPTS[2]], some_accepted, slots=[0]).run(2)
    del both.texts[0]
    both.run(3)
    alone = Rounds(ModelDrafter(*loaded), PROMPTS[:2], some_accepted).run(6)
    assert [len(proposed) for proposed in both.proposed[1]] == [K] * 6
    # The second `run` counts its rounds from 0 again, so only the text up to there is the same.
    assert both.proposed[1][:4] == alone.proposed[1][:4]


def test_a_draft_temperature_of_zero_ships_point_masses_for_sampled_requests(loaded):
    """A greedy draft is no distribution: its q is one entry of probability 1."""
    drafter = ModelDrafter(*loaded, temperature=0.0)
    Rounds(drafter, PROMPTS, some_accepted)
    rows = [DraftRow(slot, len(PROMPTS[slot]), [7], K) for slot in range(SLOTS)]
    drafter.propose(batch_of(rows, SLOTS))
    proposal = drafter.proposal()
    tokens, support, q = (np.asarray(a) for a in (proposal.tokens, proposal.support, proposal.q))
    np.testing.assert_array_equal(support[..., 0], tokens)
    np.testing.assert_array_equal(q[..., 0], 1)
    assert (support[..., 1:] == -1).all()
    assert not q[..., 1:].any()


def test_sampled_proposals_come_with_the_truncated_law_they_were_drawn_from(loaded):
    drafter = ModelDrafter(*loaded)
    Rounds(drafter, PROMPTS, some_accepted)
    rows = [DraftRow(slot, len(PROMPTS[slot]), [7], K) for slot in range(SLOTS)]
    drafter.propose(batch_of(rows, SLOTS))
    proposal = drafter.proposal()
    q = np.asarray(proposal.q)
    assert q.dtype == np.float32
    assert q.shape == (SLOTS, K, SUPPORT)
    np.testing.assert_allclose(q.sum(-1), 1, rtol=1e-6)
    assert (np.asarray(proposal.support) == np.asarray(proposal.tokens)[..., None]).any(-1).all()
