"""Programs of the first slots do there what those of all slots do, bit for bit, and no more."""

import contextlib
import copy
import logging
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.devices.draft import programs as draft_programs
from ssd_jax.devices.draft.drafter import ModelDrafter
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.opening.models import open_model
from ssd_jax.devices.programs import first_rows
from ssd_jax.devices.programs.batch_sizes import BatchPlan, BatchSizes
from ssd_jax.devices.programs.batched import BatchedPrograms
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.devices.programs.sampling_rows import SamplingRows
from ssd_jax.devices.target.base import Verification
from ssd_jax.devices.target.batch_trial import same_logits, same_outcomes
from ssd_jax.devices.target.programs import Programs
from ssd_jax.roles.drafting import Drafting
from ssd_jax.roles.records import IDLE, Outcomes, SlotOpening, draft_batch
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.testing import tiny
from tests.devices.forwards import forwards_only
from tests.fakes.watch import Watch
from tests.models.golden import ON_GPUS, ON_TPUS, execution_as
from tests.selection import cases

SLOTS, SIZES, CONTEXT, WIDTH = 5, (1, 2, 4), 256, 3
KINDS = {
    "llama": {},
    "qwen2, shared pages": {"paging": Paging(64, 12), "dtype": "bfloat16"},
    "qwen3, int8": {"dtype": "int8"},
    "llama, as on TPUs": {"there": ON_TPUS},
    "qwen3, shared pages, as on GPUs": {"there": ON_GPUS, "paging": Paging(64, 12)},
}


@pytest.fixture(scope="module", params=cases(KINDS, "qwen2, shared pages"))
def programs(request, tmp_path_factory):
    kind = KINDS[request.param]
    family = request.param.split(",")[0]
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("sizes") / "target", family)
    with execution_as(**kind["there"]) if "there" in kind else contextlib.nullcontext():
        opened = open_model(str(path), kind.get("dtype", "float32"), bitwise=True)
    with forwards_only(("forward", "accept")):
        compiled = Programs(
            opened.model,
            slots=SLOTS,
            context=CONTEXT,
            tokens=opened.tokenizer.size,
            verification=Verification(widths=(0, WIDTH), support=2),
            paging=kind.get("paging"),
            batches=BatchPlan(SIZES, at_start=True),
        )
    return compiled, opened.load()


class Slots:
    """State of all slots, with histories, and rounds over the first `live` of them."""

    def __init__(self, programs, parameters, live, seed=0):
        self.programs, self.parameters, self.live = programs, parameters, live
        self.rng = np.random.default_rng(seed)
        self.rows = SamplingRows(SLOTS, programs.model.config.vocab_size)
        settings = [
            SamplingParams(temperature=0.9, seed=4, frequency_penalty=0.4),
            SamplingParams(repetition_penalty=1.2),
            SamplingParams(temperature=1.1, top_p=0.8, seed=5),
        ]
        for slot in range(SLOTS):
            self.rows.set(SlotOpening(slot, settings[slot % 3], slot))
        structs = programs.structs
        self.pages = jax.tree.map(self._noise, structs["pages"])
        self.history = programs.new_history()._replace(
            output=self._noise(structs["history"].output),
            recent=self._noise(structs["history"].recent),
        )
        self.lengths = np.full(SLOTS, IDLE, np.int32)
        self.lengths[:live] = self.rng.integers(0, 9, live)

    def _noise(self, struct):
        if jnp.issubdtype(struct.dtype, jnp.floating):
            return jnp.asarray(self.rng.normal(size=struct.shape).astype(struct.dtype))
        return jnp.asarray(self.rng.integers(0, 40, struct.shape).astype(struct.dtype))

    def round(self, width, size):
        """Logits of the live rows, outcomes of them, pages and histories of all slots."""
        programs, rng = self.programs, np.random.default_rng(1)
        pending = rng.integers(0, 200, SLOTS).astype(np.int32)
        tokens = rng.integers(0, 200, (SLOTS, WIDTH)).astype(np.int32)
        blank = programs.verification.blank(SLOTS)
        support = np.stack([tokens, tokens + 1], axis=2)
        proposal = Proposal(
            tokens,
            np.full(SLOTS, width, np.int32),
            support.astype(np.int32),
            np.full(blank.q.shape, 0.5, np.float32),
        )
        forward = programs.batch_name(("forward", width), size)
        copies = jax.tree.map(jax.numpy.copy, (self.pages, self.history))
        logits, pages = programs[forward](
            self.parameters, copies[0], programs.any_table(), pending, tokens, self.lengths
        )
        accept = programs.select(
            programs.batch_name(("accept", SLOTS, width), size),
            lambda: self.rows.needed(self.lengths),
        )
        packed, bonus, history = accept(
            logits, proposal, self.rows.on_device(), self.lengths, copies[1], np.int32(0)
        )
        assert packed.shape == (SLOTS, width + 2)
        first = np.asarray(logits).reshape(size, width + 1, -1)[: self.live]
        outcome = np.asarray(packed)[: self.live], np.asarray(bonus)[: self.live]
        return jax.tree.map(np.asarray, (first, outcome, pages, history))


@pytest.mark.parametrize("width", [0, WIDTH])
@pytest.mark.parametrize(("live", "size"), [(1, 1), (1, 2), (2, 2), (3, 4), (4, 4)])
def test_a_batch_of_few_slots_leaves_every_bit_as_that_of_all_slots(programs, live, size, width):
    slots = Slots(*programs, live)
    every, few = slots.round(width, SLOTS), slots.round(width, size)
    for one, other in zip(jax.tree.leaves(every), jax.tree.leaves(few), strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.ptp(few[0]) > 0
    written = few[2] != np.asarray(slots.pages)
    assert written.any()


def test_rows_beyond_a_batch_are_seen_to_differ(programs):
    """The comparison above is no comparison of nothing: a size below the live rows fails it."""
    slots = Slots(*programs, 3)
    every, few = slots.round(0, SLOTS), slots.round(0, 2)
    assert not np.array_equal(every[1][0], few[1][0])


def test_a_batch_reaches_the_highest_live_slot_of_every_group_of_devices():
    one, two = SimpleNamespace(local_slots=8), SimpleNamespace(local_slots=4)
    for live, of_one, of_two in [
        ([0], 1, 1),
        ([2], 3, 3),
        ([0, 5], 6, 2),
        ([3, 4], 5, 4),
        ([], 1, 1),
    ]:
        rows = np.isin(np.arange(8), live)
        assert (BatchedPrograms.rows_of(one, rows), BatchedPrograms.rows_of(two, rows)) == (
            of_one,
            of_two,
        )


@pytest.mark.more
@pytest.mark.parametrize("fault", ["other rows", "not put back", "rows of others changed"])
def test_planted_faults_of_a_batch_are_caught(programs, monkeypatch, fault):
    first, with_rest = first_rows._first, first_rows._with_rest

    def shifted(value, every, few):
        moved = value if every.shape == few.shape else jnp.roll(value, 1, axis=0)
        return first(moved, every, few)

    def spread(result, replaced, rest, rows):
        if fault == "not put back" and replaced is not None:
            return replaced
        changed = with_rest(result, replaced, rest, rows)
        if replaced is None or fault == "not put back":
            return changed
        return jax.tree.map(
            lambda new, old: new if new.shape[0] != SLOTS else new.at[-1].set(old[0]),
            changed,
            replaced,
        )

    if fault == "other rows":
        monkeypatch.setattr(first_rows, "_first", shifted)
    else:
        monkeypatch.setattr(first_rows, "_with_rest", spread)
    few, parameters = copy.copy(programs[0]), programs[1]
    few.compile_batch(2, WIDTH)
    slots = Slots(few, parameters, 2)
    every, found = slots.round(WIDTH, SLOTS), slots.round(WIDTH, 2)
    pairs = zip(jax.tree.leaves(every), jax.tree.leaves(found), strict=True)
    assert not all(np.array_equal(*pair) for pair in pairs)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "without zeroing"])
def test_a_row_above_those_that_propose_has_no_proposal_left(tmp_path, monkeypatch, fault):
    """It has none in its last round, and its proposal of the round before was judged already."""
    if fault:
        monkeypatch.setattr(draft_programs, "_without_proposal", lambda records: records)
    opened = open_model(str(tiny.write_checkpoint(tmp_path / "draft", "llama")), "float32")
    compiled = DraftPrograms(
        opened.model,
        slots=3,
        context=128,
        tokens=opened.tokenizer.size,
        drafting=Drafting(k=2, support=4, rule="ratio"),
        batches=BatchPlan((1,), at_start=True),
    )
    drafter = ModelDrafter(compiled, opened.load())
    lengths = []
    for live in ([0, 2], [0]):
        batch = draft_batch(3, 3)
        for slot in live:
            batch.position[slot], batch.limit[slot] = 2 * len(lengths), 2
            batch.counts[slot], batch.tokens[slot, 0], batch.pending[slot] = 1, 70, 70
        drafter.propose(batch)
        lengths.append(np.asarray(drafter.proposal().length).tolist())
    assert lengths == [[2, 0, 2], [2, 0, 2 if fault else 0]]


def sizes_of(watch=None, **how):
    compiled = []

    def compile_batch(size, task):
        if "fails" in how:
            raise RuntimeError("no memory")
        how.get("waits", threading.Event()).wait(0 if "waits" not in how else None)
        compiled.append((size, task))
        return 2

    settings = {"patience": 1.0, "clock": watch or Watch(), "together": how.get("together", ())}
    return BatchSizes((1, 2, 4, 8), compile_batch, **settings), compiled


def rounds(sizes, watch, count, rows, task=0):
    chosen = []
    for _ in range(count):
        watch.now += 0.1
        chosen.append(sizes.choose(rows, task))
    return chosen


def test_a_size_is_compiled_once_rounds_have_wanted_it_for_a_while():
    watch = Watch()
    sizes, compiled = sizes_of(watch)
    assert rounds(sizes, watch, 9, rows=3) == [8] * 9
    assert not compiled
    rounds(sizes, watch, 3, rows=3)
    sizes.join()
    assert compiled == [(4, 0)]
    assert rounds(sizes, watch, 2, rows=3) == [4, 4]
    assert [sizes.choose(rows, 0) for rows in (1, 2, 4, 5, 8)] == [4, 4, 4, 8, 8]
    assert sizes.choose(3, 2) == 8  # another number of proposed tokens has programs of its own


def test_where_times_decide_a_size_comes_for_all_tasks_at_once():
    """Else the plan whose programs came first would be taken for the fastest."""
    watch = Watch()
    sizes, compiled = sizes_of(watch, together=(0, 2, "tree"))
    for task in (0, 2) * 3:  # they share the seconds
        rounds(sizes, watch, 2, rows=1, task=task)
    sizes.join()
    assert compiled == [(1, 0), (1, 2), (1, "tree")]
    assert [sizes.choose(1, task) for task in (0, 2, "tree")] == [1, 1, 1]
    rounds(sizes, watch, 12, rows=1, task=(0, "grammar"))
    sizes.join()
    extras = [(0, "grammar"), (2, "grammar"), ("tree", "grammar")]
    assert compiled[3:] == [(1, extra) for extra in extras]


def test_a_size_runs_a_round_if_it_is_compiled_for_all_that_the_round_needs():
    sizes, _ = sizes_of()
    sizes.add(1, [0])
    sizes.add(2, [0, (0, "logprobs")])
    assert sizes.choose(1, 0) == 1
    assert sizes.choose(1, 0, (0, "logprobs")) == 2
    assert sizes.choose(1, 0, (0, "logprobs"), (0, "grammar")) == 8
    sizes.trials = 1
    sizes.judge(2, 0, same=True)
    assert sizes.on_trial(2, 0, (0, "logprobs"))
    sizes.judge(2, 0, (0, "logprobs"), same=True)
    assert not sizes.on_trial(2, 0, (0, "logprobs"))


def test_a_pause_between_rounds_does_not_count():
    watch = Watch()
    sizes, compiled = sizes_of(watch)
    rounds(sizes, watch, 2, rows=1)
    watch.now += 1000
    rounds(sizes, watch, 2, rows=1)
    sizes.join()
    assert not compiled


def test_rounds_do_not_wait_for_a_size_that_is_being_compiled():
    watch, may_end = Watch(), threading.Event()
    sizes, compiled = sizes_of(watch, waits=may_end)
    assert rounds(sizes, watch, 30, rows=1) == [8] * 30
    may_end.set()
    sizes.join()
    assert compiled == [(1, 0)]
    assert sizes.choose(1, 0) == 1


def test_a_size_that_cannot_be_compiled_is_named_and_not_tried_again(caplog):
    watch = Watch()
    sizes, _ = sizes_of(watch, fails=True)
    rounds(sizes, watch, 12, rows=2)
    sizes.join()
    assert "batches of 2 are not used: they cannot be compiled: no memory" in caplog.text
    caplog.clear()
    assert rounds(sizes, watch, 30, rows=8) == [8] * 30
    assert sizes.sizes == (1, 4, 8)


def test_a_size_is_on_trial_until_it_has_agreed_a_few_times_and_dropped_if_it_does_not(caplog):
    sizes, _ = sizes_of()
    sizes.add(2, [0, 3])
    assert not sizes.on_trial(2, 0)
    sizes.trials = 2
    for _ in range(2):
        assert sizes.on_trial(2, 0)
        sizes.judge(2, 0, same=True)
    assert not sizes.on_trial(2, 0)
    assert sizes.on_trial(2, 3)
    with caplog.at_level(logging.WARNING):
        sizes.judge(2, 3, same=False)
    assert "batches of 2 are not used: their bits differ from those of 8" in caplog.text
    assert sizes.choose(2, 0) == 8


def test_the_comparison_of_a_trial_reads_live_rows_alone_of_each_group():
    rng = np.random.default_rng(0)
    every = rng.normal(size=(2 * 4 * 3, 5)).astype(np.float32)  # two groups of 4 slots, 3 rows each
    few = every.reshape(2, 4, 3, 5)[:, :2].reshape(-1, 5).copy()
    live = np.array([[True, False, False, False], [True, True, False, False]])
    few[3:6] = np.nan  # an idle slot
    assert same_logits(few, every, live)
    off = few.copy()
    off[6, 2] = np.nextafter(off[6, 2], np.float32(np.inf))
    assert not same_logits(off, every, live)
    one = Outcomes(np.array([1, 0]), np.array([[5, 6, 9], [7, 1, 1]]))
    beyond = Outcomes(np.array([1, 0]), np.array([[5, 6, 8], [7, 2, 3]]))
    other = Outcomes(np.array([1, 0]), np.array([[5, 7, 9], [7, 1, 1]]))
    assert same_outcomes(one, beyond, np.array([True, True]))
    assert not same_outcomes(one, other, np.array([True, True]))
    assert same_outcomes(one, other, np.array([False, True]))
