"""Workers that share slots or branches say what one worker says, and one that fails costs only its
own share."""

import threading
from collections import Counter

import pytest

from ssd_jax.placement.parallel.by_branches import DraftByBranches, SharedBranches, SharedRecords
from ssd_jax.placement.parallel.by_slots import DraftBySlots, SlotSplit
from ssd_jax.placement.parallel.layout import WEIGHTS, Layout, choose
from ssd_jax.placement.parallel.part import join_activities
from ssd_jax.placement.process.connection import Connection
from ssd_jax.roles.activity import Activity, Busy
from ssd_jax.roles.records import IDLE, SlotOpening, no_promotion
from ssd_jax.sampling.params import SamplingParams
from tests.fakes.instrument import instrument
from tests.fakes.stepwise import asked_records
from tests.placement.parallel.shared import sharing
from tests.placement.process.script import SLOTS, ScriptedDraft
from tests.placement.process.scripted import only_misses, request
from tests.placement.process.serving import served
from tests.sampling.edits import Edit, edited

LAYOUTS = [Layout(2, 1), Layout(1, 2), Layout(1, 3), Layout(2, 2)]
WAYS = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


@pytest.fixture(scope="module")
def alone():
    """Why rounds had no hit with one worker, by backup."""
    found = {}
    for backup in ("none", "draft", "ngram"):
        with served(backup=backup) as run:
            found[backup] = run.generate(), proposed(run)
    return found


def proposed(run):
    """Every proposal as it was verified: its tokens, and whether it came with the draft's q."""
    return sorted(
        (slot, *drafted.tokens[slot, :length].tolist(), bool(proposal.q[slot, 0].max() < 1))
        for drafted, proposal in run.target.verified
        for slot, length in enumerate(drafted.lengths.tolist())
        if length
    )


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2)], ids=str)
def test_a_worker_that_hangs_is_waited_for_once_a_round(layout, monkeypatch):
    go_on, rounds, made, branches = threading.Event(), 0, [], Connection.branches
    waits = Counter()

    def draft(spec):
        def hang(*_, last=bool(made), **__):
            if last and rounds >= 8:
                go_on.wait(60)

        made.append(ScriptedDraft(spec))
        return instrument(made[-1], note={"branch_off": hang}, delay={"grow": 3e-3})

    def counted(link, forwards, timeout, until=None):
        found = branches(link, forwards, timeout, until)
        if timeout and until is None and found is None:
            waits[link, link._expand_number] += 1
        return found

    monkeypatch.setattr(Connection, "branches", counted)
    with sharing(layout, draft, patience=0.1) as shared:
        shared.run.generate()
        for index in range(2):
            shared.run.engine.add(request(index, max_tokens=60))
        while shared.run.engine.has_work:
            rounds += 1
            shared.run.engine.step()
        go_on.set()
    assert set(waits.values()) == {1}


@WAYS
@pytest.mark.parametrize("backup", ["none", "draft", "ngram"])
def test_workers_that_share_say_what_one_worker_says(layout, backup, alone):
    """The same proposals after hits and misses, with the q of the worker that has made them."""
    with sharing(layout, backup=backup) as shared:
        causes = shared.run.generate()
    expected, proposals = alone[backup]
    assert causes == expected
    assert proposed(shared.run) == proposals
    for worker in shared.workers:
        assert not {"late", "dead", "stale"} & {*worker.remote.counters}
        assert worker.sessions[0].counters["rounds"] > 5


class NotedWorker:
    """A worker that notes whose records it gets, and which pages it loses."""

    slots, k, branches, nodes, page_size = 2, 3, 6, 0, 32

    def __init__(self):
        self.positions, self.lost = [], []

    def open(self, opening):
        pass

    def set_pages(self, slot, pages):
        pass

    def lose(self, pages):
        self.lost += pages

    def record(self, request):
        self.positions += request.promotion.position.tolist()


def test_workers_that_slots_do_not_reach_are_idle():
    workers = [NotedWorker() for _ in range(4)]
    promotion = no_promotion(5, NotedWorker.k)
    promotion.position[:] = range(5)
    asked_records(DraftBySlots(workers, slots=5), promotion)
    assert [worker.positions for worker in workers] == [[0, 1], [2, 3], [4, IDLE], []]


def test_pages_that_a_slot_gets_are_lost_to_the_workers_of_others():
    """What they had filled would pass for the new text's."""
    workers = [NotedWorker() for _ in range(3)]
    draft = DraftBySlots(workers, slots=6)
    draft.open(SlotOpening(2, SamplingParams(), pages=(7, 8, 9), reused=32, prompt=80))
    draft.set_pages(2, (7, 8, 9, 4))
    assert [worker.lost for worker in workers] == [[8, 9, 4], [], [8, 9, 4]]


@WAYS
def test_a_worker_that_is_gone_costs_its_own_share(layout):
    with sharing(layout) as shared:
        assert only_misses(shared.run.generate())
        undisturbed = proposed(shared.run)
        shared.workers[0].stop()
        shared.run.until(lambda _causes: shared.workers[0].remote.counters["dead"] > 5)
        shared.run.target.verified.clear()
        shared.run.generate()
        found, share = proposed(shared.run), layout.slots_per_worker(SLOTS)
        assert found  # the others' branches are hit
        # Those of other groups know nothing of it.
        others = [
            [proposal for proposal in run if proposal[0] >= share] for run in (found, undisturbed)
        ]
        assert others[0] == others[1]
        for worker in shared.workers[1:]:
            assert not {"late", "dead", "stale"} & {*worker.remote.counters}


FAULTS = {
    "the winner's number is that among all": (
        Layout(1, 2),
        Edit(DraftByBranches, "record", "expansion.number[rows, number]", "number"),
    ),
    "q is the first worker's": (
        Layout(1, 2),
        Edit(SharedRecords, "_of_owners", "[self.owner,", "[0 * self.owner,"),
    ),
    "the others are not told what was drafted": (
        Layout(1, 2),
        Edit(
            SharedRecords,
            "lengths",
            "limit=np.where(drafted, counts, promotion.limit)",
            "limit=promotion.limit",
        ),
    ),
    "branches are somebody else's": (
        Layout(1, 2),
        Edit(SharedBranches, "join", "of_part[rows, numbers]", "of_part[rows, numbers - 1]"),
    ),
    "slots are another's": (
        Layout(2, 1),
        Edit(DraftBySlots, "prefill", "slot, tokens", "slot, tokens[:-1]"),
    ),
    "rows are the first group's": (
        Layout(2, 1),
        Edit(SlotSplit, "rows", "in (number,", "in (0,"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_of_sharing_are_caught(name, sampled):
    layout, edit = FAULTS[name]
    expected = sampled
    with edited([edit]), sharing(layout, backup="draft", patience=5.0) as shared:
        try:
            found = shared.run.generate(temperature=1.0), proposed(shared.run)
        except (AssertionError, ValueError):
            return
        assert found != expected


@pytest.fixture(scope="module")
def sampled():
    with served(backup="draft") as run:
        return run.generate(temperature=1.0), proposed(run)


@WAYS
def test_sharing_without_a_fault_passes_what_catches_them(layout, sampled):
    with sharing(layout, backup="draft") as shared:
        assert (shared.run.generate(temperature=1.0), proposed(shared.run)) == sampled


def test_the_layout_of_workers_is_the_one_predicted_to_be_faster():
    def chosen(workers, slots, split="auto"):
        return choose(workers, split, slots=slots, branches=16, k=4)

    assert chosen(2, 1) == (1, 2)
    assert chosen(2, 2) == chosen(2, 16) == (2, 1)
    assert chosen(4, 2) == (2, 2)
    assert chosen(1, 8) == (1, 1)
    assert chosen(2, 16, "branches") == (1, 2)
    assert chosen(2, 1, "slots") == (2, 1)
    assert Layout(1, 2).cost(1, 16, 4) == 4 * (WEIGHTS + 9) + WEIGHTS + 4


def test_work_is_told_by_worker_and_slot():
    one = Activity((Busy("expand", 1.0, 3.0, [0]),), 10, 0.5)
    other = Activity((Busy("expand", 1.5, 2.0, [0, 1]), Busy("grow", 2.0, 4.0, [1])), 20, None)
    found = join_activities([one, other], slots=2)
    assert (found.bytes, found.round_trip) == (30, 0.5)
    assert found.spans == (
        Busy("expand", 1.5, 2.0, [2, 3], 1),
        Busy("expand", 1.0, 3.0, [0], 0),
        Busy("grow", 2.0, 4.0, [3], 1),
    )
    assert join_activities([one, other]).spans[0].slots == [0, 1]
