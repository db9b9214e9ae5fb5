"""SSD whose draft has devices of its own in the target's process says what plain decoding says.

Virtual CPU devices stand for accelerators.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.devices.branches.draft import BranchDraft, DeviceBranches
from ssd_jax.engine.engine import Engine
from ssd_jax.llm.llm import LLM
from ssd_jax.loading.drafts import EngineDrafts
from ssd_jax.placement import submesh as submesh_draft
from ssd_jax.placement.submesh import SubmeshDraft
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.draft_texts import DraftTexts
from ssd_jax.speculation.tuned_drafter import TunedDrafter
from ssd_jax.tuning.opening import open_chooser
from ssd_jax.tuning.throughput import WORST_CONTENTION
from tests.checkpoints import tiny_pair
from tests.llm.lengths import Comparing
from tests.llm.runs import SAMPLED, ids, outputs, requests, run
from tests.loading.variation import varied
from tests.models.golden import ON_TPUS, execution_as
from tests.sampling.edits import Edit, edited
from tests.selection import cases

PATIENCE = 120.0  # no branches are late here, however busy the machine is


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("submesh")


def opened(root, family, *, heads=2, noise=0.04, **settings):
    """A target, and a draft that often agrees with it."""
    path = root / f"{family}-{noise}"
    target, draft = tiny_pair.write(path, family, noise=noise, num_key_value_heads=heads)
    defaults = {"context": 320, "exact": "bitwise", "compile_cache": "off", "k": "3", "budget": "8"}
    defaults["draft_placement"] = "inline"
    return LLM(target, mode="ssd", draft=draft, **defaults | {"dtype": "float32"} | settings)


@pytest.fixture(scope="module")
def many(root):
    """Four slots; coupled, so that sampled text is the same in all modes, too."""
    groups = {"target_devices": "1", "draft_devices": "4"}  # neither is the default device
    return opened(root, "qwen3", slots=4, verify="coupled", draft_placement="submesh", **groups)


@pytest.fixture(scope="module")
def split(root):
    """Four devices a role; heads, channels and vocabulary are cut in four. All else is as on
    accelerators."""
    with execution_as(**ON_TPUS):
        return opened(root, "llama", heads=4, slots=4, verify="coupled", draft_placement="submesh")


def engine_of(llm, **settings):
    """A new engine with a draft of its own, and the draft."""
    loaded = varied(llm.loaded, **settings)
    roles = loaded.roles("ssd", loaded.config.speculated)
    decoder = llm.tokenizer.open_stream
    draft = roles.drafter._draft
    draft.patience = PATIENCE
    return Engine(roles.target, decoder, llm.tokenizer.eos_ids, drafter=roles.drafter), draft


def hit_rates(found):
    rates = [output.metrics["hit_rate"] for output in found]
    return [rate for rate in rates if rate is not None]


@pytest.mark.parametrize("backup", cases(["none", "ngram", "random", "draft"], "none", "draft"))
def test_text_of_a_submesh_draft_equals_autoregressive_decoding(many, backup):
    asked = requests(many, "coupled")
    engine, draft = engine_of(many, backup=backup)
    compared = Comparing(engine)
    found = run(engine, asked)
    assert {0, 3} <= set(compared.proposed)
    assert ids(found) == ids(outputs(many, asked, "ar"))
    assert 0 < np.mean(hit_rates(found)) < 1
    assert {cause for out in found for cause in out.metrics["miss_causes"] or ()} == {"miss"}
    assert set(draft.counters) <= {"waited"}
    # The draft keeps no device of the target busy.
    assert next(out for out in found if hit_rates([out])).metrics["verify_ms"] is not None


@pytest.mark.more
def test_sd_runs_on_the_same_two_groups(many):
    asked = requests(many, "coupled")
    assert ids(outputs(many, asked, "sd")) == ids(outputs(many, asked, "ar"))


@pytest.mark.more
def test_costs_are_measured_and_numbers_chosen_on_the_same_two_groups(many, tmp_path, monkeypatch):
    """What is measured is what runs: on each role's devices, over `SubmeshDraft`."""
    loaded, made = varied(many.loaded, compile_cache=str(tmp_path)), []

    usual = EngineDrafts.branching

    def branching(self, *, patience=None):
        made.append(usual(self, patience=patience))
        return made[-1]

    monkeypatch.setattr(EngineDrafts, "branching", branching)
    chooser = open_chooser(loaded)
    (measured,) = made
    assert isinstance(measured, SubmeshDraft)
    assert measured.patience > submesh_draft.PATIENCE
    assert not set(measured.counters) & {"late", "stale"}
    costs = chooser.costs
    assert 0 <= costs.contention <= WORST_CONTENTION
    assert min(*costs.verify.values(), *costs.step.values(), costs.backup) > 0
    given_k = dataclasses.replace(loaded, tuner=chooser.tuner).roles("sd", 3).drafter
    assert not isinstance(given_k, TunedDrafter)  # with one K there is nothing to choose
    tuned = varied(loaded, k="auto")  # mode sd, too
    chosen = dataclasses.replace(tuned, tuner=chooser.tuner)
    asked = requests(many, "coupled")
    for mode in ("sd", "ssd"):
        roles = chosen.roles(mode, 3)
        drafter = roles.drafter
        rule = drafter._rule if mode == "sd" else drafter._policies.rule
        assert rule == "coupled"  # all rows teach
        decoder = many.tokenizer.open_stream
        engine = Engine(roles.target, decoder, many.tokenizer.eos_ids, drafter=roles.drafter)
        assert ids(run(engine, asked)) == ids(outputs(many, asked, "ar"))
    assert chooser._observations.guess.judged > 0


@pytest.mark.slow
def test_groups_of_four_devices_say_what_autoregressive_decoding_says(split):
    assert str(split.placement).startswith("draft_placement = submesh: target on cpu:0, cpu:1")
    engine, draft = engine_of(split)
    cut = [not array.sharding.is_fully_replicated for array in draft._draft._parameters]
    assert sum(cut) > len(cut) // 2
    for pages in (draft._draft._pages, engine._target._pages):
        assert all(not page.sharding.is_fully_replicated for page in jax.tree.leaves(pages))
    asked = requests(split, "coupled")
    found = run(engine, asked)
    assert ids(found) == ids(outputs(split, asked, "ar")) == ids(outputs(split, asked, "sd"))
    assert 0 < np.mean(hit_rates(found)) < 1


@pytest.fixture(scope="module")
def one(root):
    """One slot, q that travels; and the same inline."""
    groups = {"draft_placement": "submesh", "target_devices": "0", "draft_devices": "3"}
    return [
        opened(root, "qwen3", slots=1, **settings)
        for settings in (groups, {"draft_placement": "inline"})
    ]


@pytest.mark.slow  # `tests/devices/test_key_ledger.py` says the same of fewer texts
@pytest.mark.parametrize("backup", ["none", "draft"])
def test_sampled_by_ratio_the_text_is_that_of_an_inline_draft(one, backup):
    submesh, inline = one
    asked = [
        submesh.request("to be or not to be", SamplingParams(max_tokens=40, **sampled), index)
        for index, sampled in enumerate(SAMPLED[:4])
    ]
    engine, _ = engine_of(submesh, backup=backup)
    roles = varied(inline.loaded, backup=backup).roles("ssd", 3)
    decoder = inline.tokenizer.open_stream
    oracle = Engine(roles.target, decoder, inline.tokenizer.eos_ids, drafter=roles.drafter)
    found, expected = run(engine, asked), run(oracle, asked)
    assert ids(found) == ids(expected)
    for name in ("hit_rate", "acceptance_histogram", "acceptance_by_position", "miss_causes"):
        assert [out.metrics[name] for out in found] == [out.metrics[name] for out in expected]
    assert np.mean(hit_rates(found)) > 0


def test_arrivals_and_cancels_in_the_middle_change_no_ones_text(many):
    asked = requests(many, "coupled")
    expected = dict(enumerate(ids(outputs(many, asked, "ar"))))
    engine, _ = engine_of(many)
    waiting, found = list(asked), {}
    for request in (waiting.pop(0), waiting.pop(0), waiting.pop(0)):
        engine.add(request)
    cancelled = None
    for step in range(10_000):
        if step % 5 == 4 and waiting:
            engine.add(waiting.pop(0))
        if step == 6:
            cancelled = engine.add(asked[6])
        if step == 13:
            engine.cancel(cancelled)
        for event in engine.step():
            if event.output is not None and event.request_id != cancelled:
                found[event.prompt_index] = event.output.token_ids
        if not engine.has_work:
            break
    assert found == expected


def test_each_roles_arrays_are_on_its_own_devices(many):
    engine, draft = engine_of(many)
    engine.add(requests(many, "coupled")[6])
    for _ in range(8):
        engine.step()
    first, second = jax.devices()[1], jax.devices()[4]
    arrays = [value for value in vars(draft._draft).values() if value is not None]
    of_target = vars(engine._target).values()
    assert devices_of(arrays) == {second}
    assert devices_of([list(of_target), draft._records.proposal()]) == {first}
    assert devices_of(draft._draft._record) == {second}


def devices_of(tree):
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    assert arrays
    return {device for array in arrays for device in array.devices()}


@pytest.fixture
def reads(monkeypatch):
    """(where, ready before) of every array that the host reads.

    Guards against transfers see none on CPU, where the host shares the memory.
    """
    seen = []

    def is_of_product(file):
        return "ssd_jax" in file and not file.endswith("devices/programs/device.py")

    def note(array):
        frame = sys._getframe(2)
        while frame is not None and not is_of_product(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            seen.append((frame.f_code.co_name, array.is_ready()))

    kind = type(jnp.zeros(1))
    for name in ("asarray", "array"):
        real = getattr(np, name)

        def read(array, *args, real=real, **kwargs):
            if isinstance(array, kind):
                note(array)
            return real(array, *args, **kwargs)

        monkeypatch.setattr(np, name, read)
    value, block = kind._value, kind.block_until_ready
    monkeypatch.setattr(kind, "_value", property(lambda self: (note(self), value.fget(self))[1]))
    monkeypatch.setattr(kind, "block_until_ready", lambda self: (note(self), block(self))[1])
    return seen


def test_reads_of_arrays_are_noted_by_the_test_itself(reads):
    array = jax.jit(lambda x: x + 1)(jnp.zeros(4, jnp.int32))
    assert not reads  # of this file's own reads none is the product's
    draft = BranchDraft.__new__(BranchDraft)
    draft.slots, draft.k, draft.branches = 1, 1, 1
    DeviceBranches(draft, np.ones((1, 1), np.int32), array[None, None]).branches(1)
    assert [name for name, _ in reads] == ["_read"]


@pytest.mark.parametrize("backup", cases(["none", "draft"], "draft"))
def test_a_round_blocks_on_the_outcome_alone(many, reads, backup):
    engine, _ = engine_of(many, backup=backup)
    for request in requests(many, "coupled"):
        engine.add(request)
    rounds = 0
    while engine.has_work:
        reads.clear()
        flights = len(engine._in_flight)
        engine.step()
        found = Counter(reads)
        rounds += flights
        assert found.pop(("read", True), 0) + found.pop(("read", False), 0) == flights
        # Branches are read as copies that have come; what waited for them is counted elsewhere.
        assert found.pop(("_read", True), 0) in (0, 1)
        assert not found
    assert rounds > 20


def test_the_targets_forward_comes_before_all_that_is_dispatched_for_the_draft(many, monkeypatch):
    """But for tokens that are drafted just in time."""
    engine, draft = engine_of(many, backup="none")
    inner, order = draft._draft, []
    forward, send, promote = engine._target.forward, draft._send, inner._promote

    def promoting(promotion):
        order.append("p")
        promote(promotion)

    monkeypatch.setattr(engine._target, "forward", lambda *to: (order.append("f"), forward(*to))[1])
    monkeypatch.setattr(draft, "_send", lambda what: (order.append("s"), send(what))[1])
    monkeypatch.setattr(inner, "_promote", promoting)
    found = run(engine, requests(many, "coupled")[:1])
    assert hit_rates(found)[0] > 0
    prompt, *rounds = "".join(order).split("f")
    assert prompt == "ps"
    assert len(rounds) > 2
    assert set(rounds) <= {"ps"}


def slow(draft, calls):
    """Branches that are there only at the n-th look, n of `calls`, one a round, then at once; never
    before the outcome."""
    left, expand = iter(calls), draft.expand
    waiting = next(left)

    def ready(real):
        nonlocal waiting
        waiting -= 1
        if waiting >= 0:
            return False
        waiting = next(left, 0)
        while not real():
            time.sleep(1e-4)
        return True

    def slowly(request):
        answer = expand(request)
        branches, inner = answer.branches, answer._branches
        answer.branches = lambda forwards, until=None: branches(forwards) if until is None else None
        if inner is not None:
            inner.ready = partial(ready, inner.ready)
        return answer

    draft.expand = slowly


@pytest.mark.more
def test_slow_branches_are_waited_for_and_counted(many, monkeypatch):
    asked = requests(many, "coupled")
    engine, draft = engine_of(many)
    slow(draft, [3, 0, 5, 1])
    monkeypatch.setattr(submesh_draft, "_ROUND_POLL", 0.0)
    found = run(engine, asked)
    assert draft.counters["waited"] >= 3
    assert draft.counters["late"] == 0
    assert ids(found) == ids(outputs(many, asked, "ar"))


COUNTED = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2}


@pytest.mark.parametrize("backup", cases(["none", "ngram", "draft"], "draft"))
def test_devices_that_never_answer_cost_speed_only(many, backup, monkeypatch):
    asked = requests(many, "coupled")
    engine, draft = engine_of(many, backup=backup)
    draft.patience, dispatched = 0.0, dispatches(draft)
    monkeypatch.setattr(DeviceBranches, "ready", lambda self: False)
    found = run(engine, asked)
    assert ids(found) == ids(outputs(many, asked, "ar"))
    assert draft.counters["late"] == 1
    assert draft.counters["stale"] > 20
    assert dispatched["expand"] == 1  # and no heap of programs grew behind it
    assert dispatched["record"] <= 2
    assert sum(hit_rates(found)) == 0
    causes = Counter(cause for out in found for cause in out.metrics["miss_causes"] or ())
    assert set(causes) == {"late", "stale"}


def dispatches(draft):
    """Counts the calls that dispatch to the draft's devices."""
    counts, kind = Counter(), type(draft._draft)
    for name in ("prefill", "record", "expand"):

        def call(*args, name=name, **kwargs):
            counts[name] += 1
            return getattr(kind, name)(draft._draft, *args, **kwargs)

        setattr(draft._draft, name, call)
    return counts


@pytest.fixture(scope="module")
def alike(root):
    """The draft is the target: whatever it proposes is accepted, if all goes well."""
    groups = {"target_devices": "1", "draft_devices": "4"}
    return opened(
        root, "qwen3", noise=0.0, slots=4, verify="coupled", draft_placement="submesh", **groups
    )


def caught_up(llm, missed=30):
    """A request whose draft misses many looks: its output, the plain one, and the counters."""
    params = SamplingParams(max_tokens=200, ignore_eos=True, **COUNTED)
    asked = [llm.request("a b c a b c", params)]
    engine, draft = engine_of(llm, backup="none")
    draft.patience = 0.0
    slow(draft, [0, 0, 0, 0, missed])
    found = run(engine, asked)
    return found[0], outputs(llm, asked, "ar")[0], draft.counters


def all_accepted(output):
    accepted, judged = np.array(output.metrics["acceptance_by_position"]).T
    return accepted.sum() > 20 and (accepted == judged).all()


@pytest.mark.more
def test_a_draft_that_missed_tokens_catches_up_on_keys_values_and_counts(alike):
    """Else a draft that is the target would be wrong somewhere, penalties being what they are."""
    output, alone, counters = caught_up(alike)
    assert output.token_ids == alone.token_ids
    assert all_accepted(output)
    assert counters["late"] == 1
    assert counters["stale"] > 10
    assert output.metrics["hit_rate"] > 0.5


FLAWS = {
    "the proposals of the round before": Edit(
        SubmeshDraft,
        "record",
        "SubmeshRecords(answer, *sent)",
        "SubmeshRecords(answer, *(self.__dict__.setdefault('_all', []).append(sent) or "
        "self._all[max(len(self._all) - 2, 0)]))",
    ),
    "no catching up": Edit(DraftTexts, "record", "if not text.expanded:", "if False:"),
    "counts of what was missed": Edit(
        DraftTexts,
        "record",
        "uncounted[slot] = text.recorded(position)",
        "uncounted[slot] = (text.recorded(position), committed)[1]",
    ),
    "more is dispatched behind what is overdue": Edit(
        SubmeshDraft, "overdue", "self._overdue = branches", "self._overdue = None"
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_planted_flaws_of_a_submesh_are_caught(alike, flaw):
    """By what a draft that is the target gets accepted."""
    with edited([FLAWS[flaw]]):
        output, _, counters = caught_up(alike)
        assert not (all_accepted(output) and counters["late"] == 1)


@pytest.mark.more
@pytest.mark.parametrize("kv_memory", [pytest.param(None, marks=pytest.mark.slow), "4MiB"])
def test_groups_of_the_drafts_devices_share_the_slots(root, kv_memory):
    """Two groups of two devices; where slots share pages the target is in as many groups."""
    more = {} if kv_memory is None else {"kv_memory": kv_memory, "mesh": "data=2", "page_size": 64}
    where = {"target_devices": "0-1", "draft_devices": "4-7", "draft_placement": "submesh"}
    llm = opened(root, "qwen3", slots=4, verify="coupled", draft_workers=2, **where, **more)
    assert str(llm.placement).endswith(", 2 workers that share slots")
    assert llm.draft.model.mesh.shape == {"data": 2, "tensor": 2}
    engine, _ = engine_of(llm)
    found = run(engine, requests(llm, "coupled"))
    assert ids(found) == ids(outputs(llm, requests(llm, "coupled"), "ar"))
    assert max(rate for rate in hit_rates(found) if rate is not None) > 0
