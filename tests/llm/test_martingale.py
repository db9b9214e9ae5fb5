"""Whole runs of the engine follow the law, token by token; see `martingale`.

Positive controls are faults of the host side that tests of the law of a round do not see.
"""

from __future__ import annotations

from contextlib import contextmanager

import jax
import numpy as np
import pytest

from ssd_jax import LLM
from ssd_jax.devices.programs.sampling_rows import SamplingRows
from ssd_jax.placement.host_proposals import HostProposals
from ssd_jax.placement.process.client import RemoteDraft, RemoteRecords
from ssd_jax.speculation.sequence_state import RoundState
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_drafts, tiny_pair
from tests.fakes.whimsical import Whimsical
from tests.llm.martingale import ALPHA, FEW_IDS, lose_q, say, sums
from tests.loading.variation import varied
from tests.sampling.edits import Edit, edited

COUNT = 350  # requests of 24 tokens: a shift of .014 of the likeliest token shows at 3 sigma
SLOW = 10_000


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A target, and a draft that sometimes agrees with it."""
    return tiny_pair.write(tmp_path_factory.mktemp("martingale"), "qwen3", noise=0.03)


def opened(checkpoints, mode="ssd", **settings):
    target, draft = checkpoints
    defaults = {
        "draft": str(draft),
        "dtype": "float32",
        "slots": 16,
        "k": "2",
        "proposal_support": "8",
        "context": 32,
        "compile_cache": "off",
    }
    if mode == "ssd":
        defaults |= {"budget": "4", "draft_placement": "inline"}
    if settings.get("draft_placement") == "process":
        # Both processes compile once.
        settings["compile_cache"] = jax.config.jax_compilation_cache_dir
    llm = LLM(str(target), mode=mode, **defaults | settings)
    if llm.loaded.worker is not None:
        llm.loaded.worker.patience = 120.0
    return llm


@contextmanager
def policy(llm, **settings):
    """The model with other settings that no program depends on, and a new engine."""
    loaded, llm._engines = llm.loaded, {}
    llm._loaded = varied(loaded, **settings)
    yield llm
    llm._loaded, llm._engines = loaded, {}


@pytest.fixture(scope="module")
def inline(checkpoints):
    return opened(checkpoints, fan_out="confidence", saguaro_c=0.5)


@pytest.fixture(scope="module")
def process(checkpoints):
    with opened(checkpoints, draft_placement="process", budget="2") as llm:
        yield llm


def assert_lawful(found, wanted=("first after hit", "first after miss", "k = L")):
    """No sum is larger than its law allows, and each of some is over many tokens."""
    counts = {over: count for (over, _), count in zip(found.names, found.counts, strict=True)}
    assert min(counts.get(over, 0) for over in wanted) > 0.02 * counts["all"], counts
    assert found.p_value > ALPHA, found.worst()


def assert_caught(found, at_least):
    """The fault shows, and with room to spare."""
    print(found.worst(3))  # the table of docs/exactness.md
    assert found.p_value <= ALPHA, found.worst()
    assert abs(found.sigmas).max() > at_least, found.worst()


def losing(llm, share=0.2):
    """The model's engine with a share of its q lost."""
    engine = llm.engine
    lose_q(engine._drafter, share)


@pytest.mark.slow  # `test_engine_law.py` counts fewer texts of it
def test_acceptance_is_a_martingale_with_an_inline_draft(checkpoints, inline):
    with policy(inline, backup="draft"):
        found = sums(say(inline, COUNT), *checkpoints)
    assert_lawful(found)
    of_all = dict(zip(found.names, found.sees(3), strict=True))
    assert of_all["all", "rank 0 of p"] < 0.014


@pytest.mark.slow
def test_acceptance_is_a_martingale_with_a_worker_whose_q_is_lost_at_times(checkpoints, process):
    with policy(process, backup="random"):
        losing(process)
        texts = say(process, 300)
    assert_lawful(sums(texts, *checkpoints), ("first after hit", "first after miss", "q lost"))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inline", "process"])
def test_acceptance_is_a_martingale_under_block_verification(checkpoints, where):
    settings = {"verify": "block", "k": "3", "fan_out": "confidence", "draft_placement": where}
    with opened(checkpoints, **settings) as llm:
        texts = say(llm, COUNT)
    assert_lawful(sums(texts, *checkpoints), ("first after hit", "first after miss"))


@pytest.mark.slow
def test_acceptance_is_a_martingale_with_a_draft_on_a_submesh(checkpoints):
    groups = {"target_devices": "1", "draft_devices": "4"}
    llm = opened(checkpoints, draft_placement="submesh", backup="ngram", **groups)
    llm.engine._drafter._draft.patience = 120.0
    losing(llm)
    assert_lawful(sums(say(llm, 300), *checkpoints), ("first after hit", "first after miss"))


UNSURE = 3  # a class of confidence
SELECTED_BY_CONTENT = [
    # A hit is not taken if the draft is unsure of its first token, nor are unsure tail tokens.
    Edit(
        RoundState,
        "count_won",
        "length = min(branches.lengths[slot, winner], self.limit[slot])",
        "sure = enumerate(branches.confidence[slot, winner].tolist())\n"
        f"            unsure = [place for place, each in sure if each < {UNSURE}]\n"
        "            length = min(branches.lengths[slot, winner], self.limit[slot], *unsure)",
    ),
]
KEYED_BY_SLOT = [
    Edit(
        SamplingRows,
        "set",
        "host.request[row] = opening.index",
        "host.request[row] = row",
    )
]
Q_OF_BEFORE = [
    Edit(HostProposals, "put", "self._probs = None", "pass"),
    Edit(
        RemoteDraft,
        "record",
        "proposals = HostProposals(",
        "proposals = self.__dict__.get('_before') or HostProposals(",
    ),
    Edit(
        RemoteDraft,
        "record",
        "proposals.put(",
        "self._before = proposals\n    proposals.put(",
    ),
]


@pytest.mark.slow  # `test_host.py` works it out
def test_hits_selected_by_what_the_draft_thinks_of_them_are_caught(checkpoints, inline):
    with edited(SELECTED_BY_CONTENT), policy(inline, backup="draft"):
        texts = say(inline, 300)
    assert_caught(sums(texts, *checkpoints), 8)


@pytest.mark.slow  # `test_key_ledger.py` sees it in a single text
def test_draws_keyed_by_slot_are_caught(checkpoints, inline):
    """Each text follows the law, and those of one slot resemble each other."""
    with edited(KEYED_BY_SLOT), policy(inline, backup="draft"):
        texts = say(inline, 400, names=FEW_IDS, length=4)
    assert_caught(sums(texts, *checkpoints), 8)


@pytest.mark.slow  # `test_proposals.py` sees it in a single round
def test_point_masses_that_keep_the_q_of_earlier_rounds_are_caught(
    checkpoints, process, monkeypatch
):
    """Where a round misses, and where a q never comes."""
    with edited(Q_OF_BEFORE), policy(process, backup="random"):
        assert process.engine
        take, rng = RemoteRecords._take_q, np.random.default_rng(5)

        def lossy(records):
            asked = records._asked_q
            records._asked_q = asked[rng.random(asked.size) < 0.5]
            take(records)

        monkeypatch.setattr(RemoteRecords, "_take_q", lossy)
        texts = say(process, 900, names=FEW_IDS)
    assert_caught(sums(texts, *checkpoints), 8)


@pytest.mark.slow
@pytest.mark.parametrize("backup", ["auto", "none", "ngram", "random", "draft"])
def test_acceptance_is_a_martingale_with_every_backup_of_a_worker(checkpoints, process, backup):
    with policy(process, backup=backup):
        losing(process)
        texts = say(process, SLOW // 2)
    assert_lawful(sums(texts, *checkpoints), ("first after hit",))


SLOW_INLINE = {
    "C = 1/2": {"saguaro_c": 0.5, "fan_out": "confidence", "backup": "draft"},
    "C = 0": {
        "saguaro_c": 0.0,
        "proposal_support": "full",
        "backup": "none",
        "predict": "plain",
        "fan_out": "measured",
    },
    "draft temperature": {"draft_temperature": 0.5, "k": "3", "backup": "random"},
    "block verification": {"verify": "block", "k": "3", "saguaro_c": 0.5, "backup": "draft"},
    "draft in w8a8": {"draft_dtype": "w8a8", "backup": "draft"},
    "greedy draft": {"draft_temperature": 0.0, "backup": "ngram", "fan_out": "uniform"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_INLINE)
def test_acceptance_is_a_martingale_in_longer_runs_with_an_inline_draft(checkpoints, case):
    llm = opened(checkpoints, **SLOW_INLINE[case])
    losing(llm)
    assert_lawful(sums(say(llm, SLOW), *checkpoints), ("first after hit",))


@pytest.mark.slow
def test_acceptance_is_a_martingale_with_a_target_in_int8(checkpoints):
    llm = opened(checkpoints, dtype="int8", backup="draft")
    int8 = {name: getattr(llm.target.model.execution, name) for name in ("compute", "pages")}
    assert_lawful(sums(say(llm, SLOW), *checkpoints, **int8))


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["model", "ngram"])
def test_acceptance_is_a_martingale_in_longer_runs_of_sd(checkpoints, draft):
    changes = {"draft": "ngram", "proposal_support": None} if draft == "ngram" else {}
    llm = opened(checkpoints, mode="sd", **changes)
    assert_lawful(sums(say(llm, SLOW), *checkpoints), ("first after no look-up",))


BY_TURNS = {
    "sd": {"mode": "sd"},
    "ssd": {"fan_out": "confidence", "backup": "draft"},
    "block": {"mode": "sd", "verify": "block", "k": "3"},
    "trees": {"mode": "sd", "tree_nodes": 7},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BY_TURNS)
def test_acceptance_is_a_martingale_where_rounds_do_without_the_draft_by_turns(checkpoints, case):
    with opened(checkpoints, **BY_TURNS[case]) as llm:
        llm.engine._planner = Whimsical(5)
        texts = say(llm, 2 * COUNT)
    assert_lawful(sums(texts, *checkpoints), ("nothing proposed", "k = L"))


@pytest.mark.slow  # `test_planned_rounds.py` has when the planner is asked
def test_rounds_that_do_without_the_draft_because_of_what_it_proposed_are_caught(checkpoints):
    with opened(checkpoints, mode="sd") as llm:
        drafter = llm.engine._drafter
        usual = drafter.propose

        def propose(batch):
            drafted = usual(batch)
            likes = np.asarray(drafted.tokens)[:, 0] % 2 == 0
            drafted.lengths = np.where(likes, drafted.lengths, 0).astype(np.int32)
            return drafted

        drafter.propose = propose
        texts = say(llm, COUNT, names=FEW_IDS)
    assert_caught(sums(texts, *checkpoints), 5)


TREES = [(mode, rule) for mode in ("sd", "ssd") for rule in ("coupled", "ratio", "block")]


@pytest.mark.slow  # `enumeration/test_trees.py`, `test_coupled_trees.py`, `test_tree_host.py`
@pytest.mark.parametrize(("mode", "verify"), TREES)
def test_acceptance_is_a_martingale_with_token_trees(checkpoints, mode, verify):
    with opened(checkpoints, mode=mode, verify=verify, tree_nodes=7) as llm:
        texts = say(llm, 4 * COUNT)
    first = "first after hit" if mode == "ssd" else "first after no look-up"
    assert_lawful(sums(texts, *checkpoints), (first, "k = L"))


@pytest.mark.slow
def test_acceptance_is_a_martingale_with_a_reduced_vocabulary(checkpoints, tmp_path):
    target, _ = checkpoints
    known = np.array([*range(0, 256, 2), 99, tiny.EOS, tiny.END_OF_TURN, tiny.PAD])
    known.sort()
    opened_target = tiny_drafts.open_target(target)
    draft = tiny_drafts.write(tmp_path / "draft", opened_target, known, layers=2, noise=0.03)
    llm = opened((target, draft), backup="draft", saguaro_c=0.5)
    assert_lawful(sums(say(llm, SLOW), target), ("first after hit", "first after miss"))
