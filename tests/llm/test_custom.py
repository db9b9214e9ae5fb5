"""Drafts and policies that a program gives to `LLM` as objects."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import ClassVar

import jax
import numpy as np
import pytest

from ssd_jax.config.config import Config
from ssd_jax.errors import InputError
from ssd_jax.llm.llm import LLM
from ssd_jax.loading import load as loading
from ssd_jax.loading.custom import Custom
from ssd_jax.roles.protocols import Drafter
from ssd_jax.roles.records import Drafted, DraftSetup, SlotOpening
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.fan_out import FanOut, VerificationStats
from ssd_jax.speculation.text_drafts import TextDrafter
from ssd_jax.testing.by_row import DraftRow, batch_of
from tests.checkpoints import tiny_pair
from tests.llm.runs import outputs, requests
from tests.recipes import recipe
from tests.speculation.repeating import RepeatBranches

CHAPTER = "Drafts and policies of your own"
RepeatLast = recipe("docs/python.md", CHAPTER, without="llm =")["RepeatLast"]
RepeatText = recipe("CONTRIBUTING.md", "A drafter")["RepeatLast"]
OneEach = recipe("CONTRIBUTING.md", "A policy")["OneEach"]


class Lying(RepeatLast):
    """Its q says that it hardly ever proposes what it proposes."""

    def proposal(self):
        raise AssertionError("asked for a q that it does not draw from")


class Counted(OneEach):
    """The policy of the recipe; how many were made, and for how many sequences."""

    made: ClassVar[list[Counted]] = []

    def __init__(self):
        self.made.append(self)
        self.observed = 0

    def observe(self, verified):
        self.observed += 1


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("custom"), "qwen3")[0]


def opened(target, **settings):
    defaults = {"context": 320, "dtype": "float32", "exact": "bitwise", "k": 3, "slots": 4}
    store = jax.config.jax_compilation_cache_dir
    return LLM(target, compile_cache=store, **defaults | settings)


def says_what_ar_says(llm, mode):
    asked = requests(llm, llm.config.verify)
    spoken = outputs(llm, asked, mode)
    assert [o.token_ids for o in outputs(llm, asked, "ar")] == [o.token_ids for o in spoken]
    histograms = [output.metrics["acceptance_histogram"] or [0] for output in spoken]
    accepted = np.sum([np.pad(histogram, (0, 9))[:9] for histogram in histograms], 0)
    assert accepted[0] > 0  # both ways out of a round were taken
    assert accepted[1:].sum() > 0
    return spoken


@pytest.mark.parametrize("verify", ["coupled", pytest.param("ratio", marks=pytest.mark.more)])
def test_a_drafter_leaves_the_text_as_it_is(target, verify):
    with opened(target, mode="sd", draft=Lying, verify=verify) as llm:
        assert llm.modes == ("ar", "sd")
        assert "draft='<Lying>'" in repr(llm)
        says_what_ar_says(llm, "sd")


@pytest.mark.parametrize("verify", ["coupled", pytest.param("ratio", marks=pytest.mark.more)])
def test_a_branching_draft_and_a_policy_leave_the_text_as_it_is(target, verify):
    RepeatBranches.made, Counted.made = [], []
    settings = {"budget": 8, "fan_out": Counted, "backup": "draft", "verify": verify}
    with opened(target, mode="ssd", draft=RepeatBranches, **settings) as llm:
        assert llm.modes == ("ar", "sd", "ssd")
        spoken = says_what_ar_says(llm, "ssd")
        assert sum(output.metrics["hit_rate"] or 0 for output in spoken) > 0
        says_what_ar_says(llm, "sd")
        (draft,) = RepeatBranches.made
        assert (draft.slots, draft.k, draft.branches) == (4, 3, 8)
        assert len(Counted.made) >= len(spoken)
        assert sum(policy.observed > 0 for policy in Counted.made) > len(spoken) / 2
        assert not draft.closed
    assert draft.closed


@pytest.fixture
def never_loads(monkeypatch):
    def load(*_, **__):
        raise AssertionError("loads")

    monkeypatch.setattr(loading, "Programs", load)


def made(setup):
    """A function makes one, too."""
    return RepeatLast(setup)


class Half(Drafter):
    def __init__(self, setup):
        self.k = setup.k


class OtherK(RepeatLast):
    def __init__(self, setup):
        self.k = setup.k + 1


class NoCounts(FanOut):
    pass


SD, SSD = {"mode": "sd"}, {"mode": "ssd"}
BRANCHING = SSD | {"draft": RepeatBranches}
HOSTS = {"hosts": "10.0.0.1:4000,count=2"}
SETUP = DraftSetup(slots=2, k=3, ids=99, context=64, branches=8)
OBJECT = "draft = '<RepeatLast>'"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, f"{OBJECT} means nothing with mode = 'ar'"),
        (SD | {"draft": RepeatLast(SETUP)}, "each engine needs one of its own.*draft=RepeatLast"),
        (SSD | {"draft": "d", "fan_out": Counted()}, "each sequence needs.*fan_out=Counted"),
        (SD | {"draft": 3.5}, "draft = 3.5 is not understood"),
        ({"mode": "auto"}, "mode = 'auto' is chosen by measured costs.*give sd or ssd"),
        (SD | {"k": "auto"}, "k = 'auto' is chosen by measured costs"),
        (BRANCHING | {"budget": "auto"}, "budget = 'auto' is chosen"),
        (SSD, "takes a BranchingDraft, and this has no record, expand"),
        (SD | {"draft": RepeatBranches}, "takes a Drafter, and this has no gather, propose"),
        (SD | {"draft": Half}, "takes a Drafter, and this has no propose"),
        (SSD | {"draft": "d", "fan_out": NoCounts}, "<NoCounts>: a FanOut, and this has no counts"),
        (SD | {"draft": "<RepeatLast>"}, f"{OBJECT} stands for an object.*give it to LLM itself"),
        (SD | HOSTS, "hosts = .*do not have the object draft"),
        (
            SSD | {"draft": "d", "fan_out": Counted} | HOSTS,
            "hosts = .*object fan_out = '<Counted>'",
        ),
        *(
            (BRANCHING | {name: value}, f"{name} = {value!r} is for a draft model")
            for name, value in {
                "draft_placement": "process",
                "draft_tls_ca": "ca.pem",
                "draft_devices": "1",
                "draft_cores": "1",
                "draft_workers": 2,
                "draft_dtype": "int8",
                "draft_temperature": 0.5,
                "proposal_support": 3,
                "saguaro_c": 0.5,
                "predict": "plain",
            }.items()
        ),
        (
            BRANCHING | {"draft_placement": "remote:10.0.0.1:4000"},
            "draft_placement = 'remote:10.0.0.1:4000' is for a draft model",
        ),
    ],
)
def test_settings_without_meaning_for_an_object_are_refused_by_name(
    target, never_loads, settings, message
):
    with pytest.raises(InputError, match=message):
        opened(target, **{"draft": RepeatLast} | settings)


def test_a_config_has_no_objects():
    with pytest.raises(InputError, match=r"draft = <class .*RepeatLast.* is not understood"):
        Config(mode="sd", draft=RepeatLast)


def test_a_config_that_names_an_object_is_refused_without_it(target, never_loads):
    config = Config(target=str(target), mode="ssd", draft="d", fan_out="<Counted>")
    with pytest.raises(InputError, match="fan_out = '<Counted>' stands for an object"):
        LLM(config=config)


class OtherM(RepeatBranches):
    def __init__(self, setup):
        super().__init__(setup)
        self.branches += 1


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (lambda setup: Half(setup), "draft = <lambda>: .*takes a Drafter, and this has no propose"),
        (lambda setup: None, "this has no open, set_pages, prefill, gather, propose, speculate"),
        (OtherK, "draft = <OtherK>: k = 4, and it was made for k = 3"),
    ],
)
def test_a_malformed_drafter_is_refused(draft, message):
    with pytest.raises(InputError, match=message):
        Custom(draft).drafter(SETUP, 3)


def test_a_malformed_branching_draft_is_refused():
    with pytest.raises(InputError, match="branches = 9, and it was made for branches = 8"):
        Custom(OtherM).branching(SETUP)
    with pytest.raises(InputError, match="takes a BranchingDraft, and this has no record, expand"):
        Custom(made).branching(SETUP)


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (RepeatLast, [9, 9, 9]),
        (made, [9, 9, 9]),
        (functools.partial(TextDrafter, RepeatText), [9, 9, 9]),
    ],
)
def test_a_class_a_function_and_a_draft_of_one_sequence_make_drafters(draft, expected):
    drafter = Custom(draft).drafter(SETUP, 3)
    drafter.open(SlotOpening(1, SamplingParams()))
    drafter.prefill(1, [5, 7], 0, last=True)
    drafted = drafter.propose(batch_of([DraftRow(1, 2, [9], 3)], 2))
    assert drafted.tokens[1, : drafted.lengths[1]].tolist() == expected


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((1, 2, 2), r"counts\(2, 6\) = \(1, 2, 2\); their sum is 5, and must be budget = 6"),
        ((3, 3, 0), "give 3 numbers, none negative and the last one at least 1"),
        ((3, 3), "give 3 numbers"),
        ((-1, 3, 4), "give 3 numbers"),
        ((1.0, 2, 3), "give 3 numbers"),
        (None, "give 3 numbers"),
    ],
)
def test_counts_of_a_policy_that_do_not_fit_are_refused(counts, message):
    class Scripted(FanOut):
        def counts(self, length, budget, after, confidence=()):
            return counts

    with pytest.raises(InputError, match=f"fan_out <Scripted>: .*{message}"):
        Custom(fan_out=Scripted).new_fan_out().counts(2, 6, "hit")


@pytest.mark.parametrize(("reads", "seen"), [(True, (5, 7)), (False, ())])
def test_a_policy_sees_confidence_if_it_says_that_it_reads_it(reads, seen):
    asked = []

    class Reading(OneEach):
        reads_confidence = reads

        def counts(self, length, budget, after, confidence=()):
            asked.append(confidence)
            return super().counts(length, budget, after)

        def observe(self, verified):
            asked.append(verified.confidence)

    policy = Custom(fan_out=Reading).new_fan_out()
    assert policy.reads_confidence == reads
    policy.counts(2, 6, "hit", (5, 7))
    policy.observe(VerificationStats(1, 2, "hit", confidence=(5, 7)))
    assert asked == [seen, seen]


class HalfQ(Drafter):
    """Draws the last token or its neighbour, each with q = 1/2."""

    draws_from_q = True

    def __init__(self, setup):
        self.k, self._ids, self._noise = setup.k, setup.ids, np.random.default_rng(0)

    def propose(self, batch):
        last = np.repeat(batch.pending[:, None], self.k, axis=1)
        self._both = np.stack([last, (last + 1) % self._ids], -1)
        first = self._noise.integers(2, size=last.shape) == 0
        return Drafted(batch.limit, np.where(first, self._both[..., 0], self._both[..., 1]))

    def proposal(self):
        q = np.full(self._both.shape, 0.5, np.float32)
        return SimpleNamespace(support=self._both, q=q)


@pytest.mark.more
def test_a_drafter_that_draws_from_its_q_leaves_greedy_text_as_it_is(target):
    with opened(target, mode="sd", draft=HalfQ) as llm:
        assert llm.loaded.programs.verification.support == 64
        says_what_ar_says(llm, "sd")


@pytest.mark.more
def test_a_policy_serves_beside_a_draft_model_in_a_process(tmp_path):
    class Reading(Counted):
        reads_confidence = True

        def counts(self, length, budget, after, confidence=()):
            assert len(confidence) in (0, length)
            self.known |= bool(confidence) and UNKNOWN not in confidence
            return super().counts(length, budget, after)

        known = False

    Counted.made = []
    target, draft = tiny_pair.write(tmp_path, "qwen3")
    settings = {"draft_placement": "process", "budget": 8, "fan_out": Reading}
    with opened(target, mode="ssd", draft=draft, **settings) as llm:
        assert llm.modes == ("ar", "sd", "ssd")
        says_what_ar_says(llm, "ssd")
    assert any(policy.known for policy in Counted.made)
