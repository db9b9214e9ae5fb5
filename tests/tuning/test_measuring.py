"""What a start measures, on roles whose costs are known."""

import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from ssd_jax.config import config, derived
from ssd_jax.devices.programs.batch_sizes import BatchSizes
from ssd_jax.devices.target.base import Verification
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.errors import SsdError
from ssd_jax.loading.loaded import Roles
from ssd_jax.placement.process import placement
from ssd_jax.roles.records import BranchTokens
from ssd_jax.testing.by_row import promoted
from ssd_jax.tuning import measuring, role_runs
from ssd_jax.tuning.measuring import shortest_seconds
from ssd_jax.tuning.role_runs import (
    Branches,
    ahead_run,
    seconds_of,
    varied_proposals,
    varied_tokens,
    verify_run,
)
from tests.fakes.stepwise import StepwiseDraft
from tests.fakes.watch import Watch

SLOTS, CONTEXT, K, IDS = 2, 64, 4, 500


class Target:
    """Takes 1 s and a tenth for each proposed token, the first time 50 s."""

    slots, context = SLOTS, CONTEXT

    def __init__(self, watch):
        self.watch, self.cold, self.width = watch, True, 0
        self.bonus = np.zeros(SLOTS, np.int32)
        self.open = lambda *_: None

    def forward(self, tokens, lengths, drafted=None):
        assert tokens.shape == lengths.shape == (SLOTS,)
        self.width = 0 if drafted is None else int(drafted.lengths.min())
        assert lengths.min() > 0
        assert lengths.max() + self.width < CONTEXT
        self.watch.now += 50.0 * self.cold
        self.cold = False
        return self

    def accept(self, logits, proposal=None):
        return logits

    def read(self):
        self.watch.now += 1.0 + 0.1 * self.width


def test_a_verification_of_each_width_is_timed_when_it_is_warm():
    watch = Watch()
    proposals = {0: None, 2: SimpleNamespace(tokens=None), 4: SimpleNamespace(tokens=None)}
    verify = verify_run(Target(watch), proposals, ids=IDS)
    found = [seconds_of(partial(verify, width), watch) for width in proposals]
    assert found == pytest.approx([1.0, 1.2, 1.4])


def test_no_two_rows_that_are_measured_have_one_token():
    """Alike rows would use the same experts, as those of texts do not."""
    tokens = varied_tokens(49_152, 16, 64)
    assert len({*tokens.flat}) == tokens.size
    assert 0 < tokens.min() <= tokens.max() < 49_152
    assert varied_tokens(3, 2, 2).tolist() == [[1, 2], [1, 2]]
    target, seen = Target(Watch()), []
    target.forward = lambda tokens, _, drafted: seen.append((tokens, drafted.tokens)) or target
    proposals = varied_proposals(loaded().programs, SLOTS, [K])
    verify_run(target, proposals, ids=IDS)(K)
    (pending, proposed) = seen[0]
    assert len({*pending.flat, *proposed.flat}) == SLOTS * (1 + K)


class Ahead:
    """A target whose forwards take 1 s each, one after the other, and its host 0.4 s for each."""

    slots, context = SLOTS, CONTEXT

    def __init__(self, watch):
        self.watch, self.free, self.delay = watch, 0.0, 0.0

    def forward(self, tokens, lengths):
        assert tokens is self or tokens.shape == lengths.shape == (SLOTS,)
        assert 0 < lengths.min() <= lengths.max() < CONTEXT
        self.watch.now += 0.4
        self.free = max(self.free, self.watch.now) + 1.0
        return self.free

    def accept(self, logits):
        return SimpleNamespace(bonus=self, read=lambda: self.read(logits))

    def read(self, done):
        self.watch.now = max(self.watch.now, done) + self.delay
        self.delay = 0.0


@pytest.mark.parametrize("delay", [0.0, 0.9])
def test_rounds_that_look_ahead_hide_the_host_and_no_delay_hides_a_round(delay):
    """Other work delays the host behind the round that is not timed; it is another's beginning."""
    watch = Watch()
    target = Ahead(watch)
    run = ahead_run(target, watch, ids=IDS)
    first = (0.4 + 8 * 1.0) / 8  # of a host that dispatches the first round to an idle target
    assert run(8) == pytest.approx(first)
    target.delay = delay
    assert run(8) >= first - 1e-9


class Draft(StepwiseDraft):
    """A forward of M branches takes M hundredths of a second, a drafted token 0.3 s.

    `late` answers do not come in time.
    """

    slots, k, branches = SLOTS, K, 16

    def __init__(self, watch, late=0):
        self.watch, self.late, self.expanded = watch, late, None
        self.elsewhere = 0.0  # what its proposals take to come
        self.open = lambda *_: None
        self.length = [0] * SLOTS

    def prefill(self, slot, tokens, offset):
        self.length[slot] = offset + len(tokens)

    def promote(self, promotion):
        moves = promoted(promotion)
        assert [moved.slot for moved in moves] == list(range(SLOTS))
        assert [moved.position + 1 for moved in moves] == self.length
        self.expanded = None

    def draft(self, limits, *, lowered):
        self.watch.now += 0.3 * limits.max()
        late = self._is_late()
        return lambda: limits * (not late)

    def proposal(self):
        self.watch.now += self.elsewhere

    def branch_off(self, counts, *, follow, lowered, forwards):
        assert not follow.any()
        assert set(counts.sum(axis=1)) <= {4, 8, 16}
        self.expanded = counts.sum(axis=1).max(), forwards

    def branch_tokens(self, forwards, until=None):
        budget, made = self.expanded
        assert forwards <= made
        self.watch.now += 0.01 * budget * forwards
        if self._is_late():
            return "late"
        return BranchTokens(*(np.zeros(0),) * 4, forwards)

    def _is_late(self):
        self.late -= 1
        return self.late >= 0


@pytest.mark.parametrize("late", [0, 1, 3])
def test_branches_are_timed_by_their_number_and_late_answers_are_asked_for_again(late, monkeypatch):
    monkeypatch.setattr(role_runs, "_PAUSE", 0.0)
    watch = Watch()
    draft = Draft(watch, late)
    branches = Branches(draft, CONTEXT, ids=IDS, clock=watch)
    assert branches.expansion(4) == pytest.approx(K * 0.04, rel=0.6 if late else 1e-6)
    assert branches.expansion(16) == pytest.approx(K * 0.16)
    assert branches.just_in_time() == pytest.approx(0.3)


def test_a_worker_that_never_answers_is_reported(monkeypatch):
    monkeypatch.setattr(role_runs, "_PAUSE", 0.0)
    watch = Watch()
    draft = Draft(watch, 10**9)
    branches = Branches(draft, CONTEXT, ids=IDS, clock=watch)
    with pytest.raises(SsdError, match="did not answer for 60 s while its speed was measured"):
        branches.expansion(4)


def test_proposals_that_come_from_elsewhere_are_timed_until_they_are_there():
    watch = Watch()
    draft = Draft(watch)
    draft.elsewhere = 0.5  # of two tokens
    backup = Branches(draft, CONTEXT, ids=IDS, clock=watch).just_in_time()
    assert backup == pytest.approx(0.3 + 0.25)


class Hidden(Draft):
    """Its forwards run while nobody waits for them."""

    def branch_off(self, counts, *, follow, lowered, forwards):
        super().branch_off(counts, follow=follow, lowered=lowered, forwards=forwards)
        self.ready = self.watch.now + 0.01 * self.expanded[0] * forwards

    def branch_tokens(self, forwards, until=None):
        self.watch.now = max(self.watch.now, self.ready)
        return BranchTokens(*(np.zeros(0),) * 4, forwards)


@pytest.mark.parametrize(("kind", "together"), [(Hidden, 1.4), (Draft, 1.4 + K * 0.16)])
def test_branches_are_timed_with_a_verification_that_begins_with_them(kind, together):
    watch = Watch()
    verify = verify_run(Target(watch), {0: None, 4: SimpleNamespace(tokens=None)}, ids=IDS)
    branches = Branches(kind(watch), CONTEXT, ids=IDS, clock=watch)
    seconds = branches.expansion(16, lambda: verify(4))
    assert seconds == pytest.approx(together)


class Slow(Draft):
    """Its answers come after 30 ms; who waits for less has none."""

    def __init__(self, patience):
        super().__init__(Watch())
        self.patience = patience

    def _is_late(self):
        time.sleep(min(0.03, self.patience))
        return self.patience < 0.03


def loaded(mode="ssd", *, branching=None, **parts):
    """As much of `Loaded` as measuring takes."""
    programs = SimpleNamespace(
        widths=(0, K),
        verification=Verification(widths=(0, K)),
        model=SimpleNamespace(place=lambda arrays: arrays, mesh=None, data_shards=1),
        slots=SLOTS,
        ids=IDS,
        batch_sizes=BatchSizes([SLOTS]),
    )
    settings = {"mode": mode, "target": "t", "draft": "d", "k": str(K), "slots": SLOTS}
    given = config.Config(**settings, budget="auto")
    return SimpleNamespace(
        config=given,
        resolved=SimpleNamespace(budgets=given.budgets_at()),
        programs=programs,
        roles=lambda *_: Roles(Target(Watch()), None),
        new_stock=lambda: None,
        drafts=SimpleNamespace(branching=branching),
        **parts,
    )


def test_a_draft_elsewhere_slower_than_a_round_waits_for_it_is_timed_all_the_same(monkeypatch):
    monkeypatch.setattr(derived, "AUTO_BUDGETS", (4, 16))
    monkeypatch.setattr(role_runs, "PATIENCE", 10.0)  # of all attempts, so that failing is quick
    monkeypatch.setattr(measuring, "_MAX_SECONDS", 0.0)
    closed = []
    worker = SimpleNamespace(end_last=lambda: closed.append(True))
    made = loaded(branching=lambda patience=0.01: Slow(patience), worker=worker)
    costs = measuring.measure(made, CONTEXT)
    assert min(costs.step.values()) >= 0.03 / K
    assert costs.backup >= 0.03 / 2
    assert closed == [True]


@pytest.mark.parametrize(("kind", "contention"), [(Hidden, 0.0), (Draft, 1.0)])
def test_contention_between_the_roles_is_measured(kind, contention):
    watch = Watch()
    made = loaded(branching=lambda patience: kind(watch), worker=None)
    made.roles = lambda *_: Roles(Target(watch), None)
    costs = measuring.measure(made, CONTEXT, clock=watch)
    assert costs.verify == pytest.approx({0: 1.0, K: 1.4})
    assert costs.ahead == pytest.approx(1.0)
    assert measuring.measure_target(made, clock=watch).verify == pytest.approx(costs.verify)
    assert costs.step == pytest.approx({4: 0.04, 8: 0.08, 16: 0.16})
    assert costs.contention == pytest.approx(contention)


def test_rounds_of_sd_are_measured_with_the_draft_that_they_will_have(monkeypatch):
    """In an engine of mode ssd that is its own draft, wherever it is."""
    watch, asked, ended = Watch(), [], []
    worker = SimpleNamespace(end_last=lambda: ended.append(True))
    made = loaded("auto", branching=lambda patience: Draft(watch), worker=worker)

    def roles(mode, _k, *, patience=None):
        asked.append((mode, patience))
        return Roles(Target(watch), SimpleNamespace(k=K))

    made.roles = roles
    rounds = SimpleNamespace(begin=lambda *_: True, run=lambda: 2.0, draft=lambda: 0.4, rows=0)
    monkeypatch.setattr(measuring, "rounds_of", lambda *_: rounds)
    costs = measuring.measure(made, CONTEXT, clock=watch)
    assert asked == [("ar", None), ("ssd", measuring.PATIENCE)]
    assert (costs.rounds, costs.draft) == ({1: 2.0, K: 2.0}, 0.4 / K)
    assert rounds.rows == SLOTS
    assert len(ended) == 2  # each stream before the next begins


class FewSlots(Target):
    """Takes a third as long for one slot, as its programs do there."""

    def forward(self, tokens, lengths, drafted=None):
        self.width = 0 if drafted is None else int(drafted.lengths.max())
        self.share = (lengths >= 0).sum() / SLOTS
        return self

    def read(self):
        self.watch.now += (1.0 + 0.1 * self.width) * (1 if self.share == 1 else 1 / 3)


class FewBranches(Hidden):
    """Takes half as long for one slot."""

    def promote(self, promotion):
        self.rows = sum(moved.position >= 0 for moved in promoted(promotion))

    def branch_off(self, counts, *, follow, lowered, forwards):
        assert (counts.sum(axis=1) > 0).sum() == self.rows
        super().branch_off(counts[: self.rows], follow=follow, lowered=lowered, forwards=forwards)
        self.ready -= (self.ready - self.watch.now) * (self.rows < SLOTS) / 2


@pytest.mark.parametrize("there", [True, False])
def test_costs_of_a_batch_size_are_measured_where_its_programs_are_there(there):
    watch = Watch()
    made = loaded(branching=lambda patience: FewBranches(watch), worker=None)
    made.roles = lambda *_: Roles(FewSlots(watch), None)
    sizes = made.programs.batch_sizes = BatchSizes([1, SLOTS])
    sizes.trials = 3
    sizes.add(1, [0, K] if there else [0])
    costs = measuring.measure(made, CONTEXT, clock=watch)
    assert costs.verify == pytest.approx({0: 1.0, K: 1.4})
    assert costs.step == pytest.approx({4: 0.04, 8: 0.08, 16: 0.16})
    assert list(costs.few) == ([1] if there else [])
    if there:
        assert costs.few[1].verify == pytest.approx({0: 1 / 3, K: 1.4 / 3})
        assert costs.few[1].step == pytest.approx({4: 0.02, 8: 0.04, 16: 0.08})
    assert sizes.on_trial(1, 0)  # on texts of users, which these were not


def test_slots_of_a_worker_have_pages_where_they_share_them():
    """It takes no opening without any."""
    watch, opened = Watch(), []
    draft = Hidden(watch)
    draft.open = opened.append
    made = loaded(branching=lambda patience: draft, worker=None)
    made.roles = lambda *_: Roles(Target(watch), None)
    made.new_stock = lambda: PageStock(slots=SLOTS, count=8, size=16, beyond=5, context=CONTEXT)
    measuring.measure(made, CONTEXT, clock=watch)
    assert [opening.pages for opening in opened] == [(0, 1, 2)] * SLOTS


def test_drafts_in_a_worker_wait_as_long_as_they_are_told(monkeypatch):
    patience = []

    def remote(*_, **settings):
        patience.append(settings["patience"])
        return SimpleNamespace()

    monkeypatch.setattr(placement, "RemoteDraft", remote)
    monkeypatch.setattr(placement.WorkerStreams, "wait_ready", lambda self, timeout, until: True)
    supervisor = SimpleNamespace(end=None, link=None, take_stream=lambda: None)
    monkeypatch.setattr(placement, "Supervisor", lambda *_: supervisor)
    settings = SimpleNamespace(spec=SimpleNamespace(draft_temperature=None), token="")
    worker = placement.DraftWorker(settings, patience=2.0)
    worker.draft()
    worker.draft(60.0)
    assert patience == [2.0, 60.0]


@pytest.mark.parametrize("context", [12, 20, 64, 4096])
def test_the_measured_position_fits_the_context(context):
    assert 0 <= role_runs._position(context, 8) <= max(0, context - 10)


def test_the_first_run_warms_up_and_is_not_timed():
    times = iter([10.0, 13.0])
    runs = []
    assert seconds_of(lambda: runs.append(True), lambda: next(times)) == 3.0
    assert len(runs) == 2


class Machine:
    """Two parts that take 1 s and 2 s alone, and three times as long where `busy(run)` says so."""

    def __init__(self, busy):
        self.watch, self.busy, self.order = Watch(), busy, []

    def part(self, name, alone):
        self.order.append(name)
        seconds = alone * (3 if self.busy(len(self.order)) else 1)
        self.watch.now += seconds
        return seconds

    def measured(self):
        parts = {(name, 0): partial(self.part, name, alone) for name, alone in (("a", 1), ("b", 2))}
        return [*shortest_seconds(parts, self.watch).values()]


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(measuring, "_MAX_SECONDS", 1e9)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("busy", "turns"), [(lambda _: False, 3), (lambda run: run <= 4, 4), (lambda run: run % 5, 10)]
)
def test_parts_take_turns_until_the_shortest_times_are_confirmed(busy, turns):
    machine = Machine(busy)
    assert machine.measured() == [1, 2]
    assert machine.order == ["a", "b"] * turns


@pytest.mark.usefixtures("patient")
def test_work_beside_all_measurements_slows_all_of_them_alike():
    assert Machine(lambda _: True).measured() == [3, 6]


def test_no_more_turns_begin_once_they_took_long(monkeypatch):
    monkeypatch.setattr(measuring, "_MAX_SECONDS", 30.0)
    machine = Machine(lambda run: run % 5)
    machine.measured()
    assert 30 <= machine.watch.now - 100 < 30 + 9
