"""SSD whose draft is a model in a worker process says what autoregressive decoding says."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from ssd_jax.config import derived
from ssd_jax.devices.opening.models import OpenedModel
from ssd_jax.engine.engine import Engine
from ssd_jax.errors import InputError
from ssd_jax.llm.llm import LLM
from ssd_jax.loading import load as loading
from ssd_jax.placement.process import placement
from ssd_jax.roles.records import BranchTokens
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.pace import Pace
from ssd_jax.system import cores
from tests.checkpoints import tiny_pair
from tests.fakes.paces import Hasty, Moody, Patient
from tests.fakes.tuners import Restless
from tests.llm.lengths import Comparing
from tests.llm.runs import outputs, requests, run
from tests.loading.variation import varied
from tests.placement.process.fake_worker import command
from tests.selection import cases
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("steady_streams")
PATIENCE = 120.0  # no answer is late here, however busy the machine is


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory of two checkpoints that often agree."""
    root = tmp_path_factory.mktemp("process")
    tiny_pair.write(root, "qwen3")
    return root


def opened(made, *, draft="draft", **settings):
    defaults = {"context": 320, "dtype": "float32", "exact": "bitwise", "k": "3", "budget": "8"}
    defaults |= {"draft_placement": "inline", "slots": 4, "fan_out": "confidence"}
    llm = LLM(
        str(made / "target"),
        mode="ssd",
        draft=str(made / draft),
        compile_cache=jax.config.jax_compilation_cache_dir,  # both processes compile once
        **defaults | settings,
    )
    if llm.loaded.worker is not None:
        llm.loaded.worker.patience = PATIENCE
    return llm


@pytest.fixture(scope="module")
def many(made):
    """Four slots."""
    with opened(made, draft_placement="process") as llm:
        yield llm


@pytest.fixture(scope="module")
def alike(made):
    """The draft is the target: whatever it proposes is accepted, if all goes well."""
    with opened(made, draft="target", draft_placement="process") as llm:
        yield llm


def engine_of(llm, *, pace=None, **settings):
    """A new engine over a stream of its own; it waits for all that is to come."""
    loaded = varied(llm.loaded, **settings)
    roles = loaded.roles("ssd", loaded.config.speculated)
    roles.drafter._waiting.pace = pace or Patient()
    decoder = llm.tokenizer.open_stream
    return Engine(roles.target, decoder, llm.tokenizer.eos_ids, drafter=roles.drafter)


def remote(llm):
    """The draft of the newest engine."""
    return llm.loaded.worker.drafts[-1]


@pytest.mark.parametrize("backup", cases(["none", "ngram", "draft"], "draft"))
@pytest.mark.parametrize("fixture", cases(["many", "alike"], "many"))
def test_text_equals_autoregressive_decoding(request, fixture, backup):
    llm = request.getfixturevalue(fixture)
    asked = requests(llm, llm.config.verify)
    engine = engine_of(llm, backup=backup)
    if fixture == "alike":  # it would never miss
        shuffle_outcomes(remote(llm))
    compared = Comparing(engine)
    found = run(engine, asked)
    assert {0, 3} <= set(compared.proposed)
    assert [one.token_ids for one in found] == [one.token_ids for one in outputs(llm, asked, "ar")]
    metrics = [one.metrics for one in found if one.metrics["hit_rate"] is not None]
    assert 0 < np.mean([metric["hit_rate"] for metric in metrics]) < 1
    assert {cause for metric in metrics for cause in metric["miss_causes"]} == {"miss"}


def shuffle_outcomes(draft):
    """The branches of each third expansion are told to be for one another's outcomes."""
    expand, count = draft.expand, 0

    def counted(request):
        nonlocal count
        count += 1
        answer = expand(request)
        return answer if count % 3 else Shuffled(answer)

    draft.expand = counted


class Shuffled:
    """Branches that are told to be for one another's outcomes."""

    def __init__(self, answer):
        self._answer, self._before, self._shuffled = answer, None, None

    def branches(self, forwards, until=None):
        found = self._answer.branches(forwards, until)
        if not isinstance(found, BranchTokens):
            return found
        if found is not self._before:
            complete = (found.bonus >= 0).all(axis=1, keepdims=True)
            bonus = np.where(complete, np.roll(found.bonus, 1, axis=1), found.bonus)
            self._before, self._shuffled = found, found._replace(bonus=bonus)
        return self._shuffled


@pytest.mark.more
@pytest.mark.parametrize("pace", cases([Hasty, Moody, Pace], Moody))
def test_text_does_not_depend_on_what_is_waited_for(many, pace):
    asked = requests(many, many.config.verify)
    found = run(engine_of(many, pace=pace(), backup="auto"), asked)
    assert [one.token_ids for one in found] == [one.token_ids for one in outputs(many, asked, "ar")]


@pytest.mark.slow
def test_a_worker_has_programs_of_every_budget_and_is_measured(made, monkeypatch):
    """The text stays while plans change every round; one draft is left for each engine."""
    monkeypatch.setattr(derived, "AUTO_BUDGETS", (3, 8))
    settings = {"verify": "coupled", "draft_placement": "process"}
    with opened(made, budget=None, **settings) as llm:
        assert llm.resolved.budgets == (3, 8)
        costs = llm._chooser.costs
        assert set(costs.step) == {3, 8}
        assert min(costs.backup, *costs.step.values(), *costs.verify.values()) > 0
        assert llm.loaded.worker.drafts == []
        tuner = Restless((1, 2, 3), (2, 3, 8), seed=2)
        llm._loaded = dataclasses.replace(llm.loaded, tuner=lambda *_: tuner)
        asked = requests(llm, "coupled")
        found = run(engine_of(llm, backup="auto", pace=Moody()), asked)
        assert [one.token_ids for one in found] == [
            one.token_ids for one in outputs(llm, asked, "ar")
        ]
        rates = [one.metrics["hit_rate"] for one in found]
        assert np.mean([rate for rate in rates if rate is not None]) > 0.1
        assert {plan.k for plan in tuner.plans} == {1, 2, 3}
        assert {plan.budget for plan in tuner.plans} == {2, 3, 8}


@pytest.mark.more
def test_rounds_are_those_of_a_draft_in_the_same_process(made, many):
    names = ("hit_rate", "acceptance_histogram", "acceptance_by_position", "miss_causes")
    with opened(made) as inline:
        asked = requests(inline, inline.config.verify)
        for backup in ("none", "draft"):
            one, other = (run(engine_of(llm, backup=backup), asked) for llm in (inline, many))
            for name in names:
                assert [out.metrics[name] for out in one] == [out.metrics[name] for out in other]
    assert one[0].metrics["verify_ms"] is None  # draft and target share a device
    assert other[0].metrics["verify_ms"] is not None


def all_accepted(metrics):
    accepted, judged = np.array(metrics["acceptance_by_position"]).T
    return accepted.sum() > 20 and (accepted == judged).all()


@pytest.mark.more
@pytest.mark.parametrize("backup", ["none", "draft"])
def test_the_q_that_travels_is_the_q_drawn_from(alike, backup):
    """p / q is then 1 everywhere, as long as both keep the same tokens."""
    params = SamplingParams(temperature=0.9, top_k=4, max_tokens=150, ignore_eos=True, seed=5)
    asked = [alike.request("to be or not to be", params)]
    (output,) = run(engine_of(alike, backup=backup), asked)
    assert all_accepted(output.metrics)
    assert len(set(output.token_ids)) > 20


COUNTED = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2}


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="signals to a process that must go on")
@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.slow), "stopped"])
def test_a_worker_that_missed_tokens_catches_up_on_keys_values_and_counts(alike, how):
    """Else a draft that is the target would be wrong somewhere, penalties being what they are."""
    llm, worker = alike, alike.loaded.worker
    params = SamplingParams(max_tokens=200, ignore_eos=True, **COUNTED)
    (alone,) = llm.generate(["a b c a b c"], params, mode="ar")
    engine = engine_of(llm, backup="none")
    draft = remote(llm)
    engine.add(llm.request("a b c a b c", params))
    ids, output = [], None

    def step(until):
        nonlocal output
        while output is None and not until():
            for event in engine.step():
                ids.extend(event.token_ids)
                output = event.output

    step(lambda: len(ids) > 40)
    starts, before = worker.supervisor.starts, draft.counters.copy()
    if how == "killed":
        os.kill(worker.supervisor.pid, signal.SIGKILL)
    else:
        os.kill(worker.supervisor.pid, signal.SIGSTOP)
        worker.patience = draft.patience = 0.2
    step(lambda: len(ids) > 80)
    assert draft.counters["dead" if how == "killed" else "late"] > 0
    if how == "killed":
        eventually(lambda: worker.supervisor.starts == starts + 1)
        eventually(lambda: draft.streams.wait_ready(10))
    else:
        os.kill(worker.supervisor.pid, signal.SIGCONT)
        eventually(lambda: draft.streams.current.answered)
    worker.patience = draft.patience = PATIENCE
    lost = draft.counters.copy()
    step(lambda: False)
    assert output is not None
    assert output.token_ids == alone.token_ids
    assert all_accepted(output.metrics)
    again = draft.counters - lost
    assert again["dead"] + again["late"] + again["stale"] <= 1
    assert output.metrics["hit_rate"] > 0.3
    assert (draft.counters["connections"] > before["connections"]) == (how == "killed")


@pytest.mark.slow
def test_mode_sd_runs_beside_a_draft_in_a_process(many):
    asked = requests(many, many.config.verify)
    one, other = (outputs(many, asked, mode) for mode in ("ar", "sd"))
    assert [output.token_ids for output in one] == [output.token_ids for output in other]


@pytest.mark.more
@pytest.mark.parametrize("when", ["compiling", "loading"])
def test_a_worker_that_fails_is_reported_before_more_is_done(made, monkeypatch, when):
    """To compile and load a large target takes minutes."""
    workers, called = [], []

    class Failing(placement.DraftWorker):
        def __init__(self, settings):
            super().__init__(settings, command=command("error"))
            workers.append(self)

    def wait(*_, **__):
        called.append(when)
        with pytest.raises(InputError):
            workers[0].supervisor.wait_ready()

    def never(*_, **__):
        called.append("later")

    monkeypatch.setattr(placement, "DraftWorker", Failing)
    monkeypatch.setattr(loading, "Programs", wait if when == "compiling" else lambda *_, **__: None)
    monkeypatch.setattr(OpenedModel, "load", wait if when == "loading" else lambda *_: None)
    monkeypatch.setattr(loading, "find_fallbacks", never)
    with pytest.raises(InputError, match="no room for the draft"):
        opened(made, draft_placement="process")
    assert called == [when]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processor cores of Linux")
def test_every_thread_of_the_worker_runs_on_its_cores_alone(made, monkeypatch):
    before = os.sched_getaffinity(0)
    core = max(before)

    def note(wanted):
        pinned.append(wanted)
        return lambda: None

    monkeypatch.setattr(cores, "pin", note)  # not this process
    pinned = []
    with opened(made, draft_placement="process", draft_cores=str(core), draft="target") as llm:
        assert pinned == [tuple(sorted(before - {core}))] * (len(before) > 1)
        llm.generate("a", SamplingParams(max_tokens=4))
        tasks = list(Path(f"/proc/{llm.loaded.worker.supervisor.pid}/task").iterdir())
        assert len(tasks) > 3
        assert {frozenset(os.sched_getaffinity(int(task.name))) for task in tasks} == {
            frozenset({core})
        }
