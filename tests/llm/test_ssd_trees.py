"""Token trees under SSD on tiny models: the text of decoding token by token, wherever they run."""

import numpy as np
import pytest

from ssd_jax.errors import InputError
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from tests.llm import tree_models
from tests.llm.bitwise import skip_unless_bitwise
from tests.llm.preempted import FEW, asked, put_off
from tests.llm.runs import PROMPTS, ids, outputs, requests

pytestmark = pytest.mark.usefixtures("steady_streams")
SLOW, MORE = pytest.mark.slow, pytest.mark.more
INLINE, PROCESS = {"draft_placement": "inline"}, {"draft_placement": "process"}
CASES = [
    pytest.param("qwen3", "float32", 3, 8, {"backup": "none"}),
    pytest.param("qwen2", "float32", 4, 12, {"backup": "draft", "budget": 2}, marks=MORE),
    pytest.param("llama", "bfloat16", 4, 16, {"backup": "ngram"}, marks=MORE),
    pytest.param("qwen2", "float32", 1, 4, {"budget": 3}, marks=SLOW),
    pytest.param("llama", "float32", 2, 31, PROCESS, marks=SLOW),
    pytest.param("llama", "bfloat16", 3, 12, PROCESS | {"backup": "draft"}, marks=SLOW),
    pytest.param("qwen3", "int8", 8, 24, PROCESS | {"backup": "random"}, marks=SLOW),
    pytest.param("qwen2", "bfloat16", 15, 16, {"slots": 1}, marks=SLOW),
]
SUBMESH = {"draft_placement": "submesh", "draft_devices": "2"}
BY_SLOTS = PROCESS | {"draft_workers": 2, "draft_split": "slots"}
BY_BRANCHES = PROCESS | {"draft_workers": 2, "draft_split": "branches"}
PLACES = [
    pytest.param(BY_SLOTS, marks=MORE, id="two processes"),
    pytest.param(BY_BRANCHES, marks=MORE, id="two processes that share branches"),
    pytest.param(PROCESS, marks=SLOW, id="process"),
    pytest.param(SUBMESH | {"target_devices": "1"}, marks=SLOW, id="submesh"),
    pytest.param(SUBMESH | {"mesh": "data=2", "slots": 4}, marks=SLOW, id="groups"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tree_models.write(tmp_path_factory.mktemp("trees"))


def opened(pair, k, nodes, **settings):
    llm = tree_models.opened(pair, k, nodes, mode="ssd", **INLINE | settings)
    for worker in getattr(llm.loaded.worker, "workers", [llm.loaded.worker]):
        if worker is not None:
            worker.patience = 120.0  # no answer is late here, however busy the machine is
    return llm


@pytest.mark.parametrize(("family", "dtype", "k", "nodes", "settings"), CASES)
def test_text_and_logprobs_equal_autoregressive_decoding(
    checkpoints, family, dtype, k, nodes, settings
):
    skip_unless_bitwise(dtype)
    pair = checkpoints[family]
    with opened(pair, k, nodes, dtype=dtype, exact="bitwise", **settings) as llm:
        assert llm.loaded.exact == "bitwise"
        wanted = requests(llm, "coupled", logprobs=2)
        alone, spoken = outputs(llm, wanted, "ar"), outputs(llm, wanted, "ssd")
        for one, other in zip(alone, spoken, strict=True):
            assert one.token_ids == other.token_ids
            assert one.finish_reason == other.finish_reason
            assert one.logprobs == other.logprobs
        metrics = [output.metrics for output in spoken if output.metrics["tree_rounds"]]
        assert max(metric["hit_rate"] or 0 for metric in metrics) > 0
        assert max(len(row["acceptance_histogram"]) for row in metrics) > 1  # a node was taken


JUST_IN_TIME = [
    pytest.param({}, id="inline"),
    pytest.param(PROCESS, marks=MORE, id="process"),
    pytest.param(BY_SLOTS, marks=SLOW, id="two processes"),
    pytest.param(BY_BRANCHES, marks=MORE, id="two processes that share branches"),
    pytest.param(SUBMESH | {"target_devices": "1"}, marks=SLOW, id="submesh"),
    pytest.param(SUBMESH | {"mesh": "data=2", "slots": 4}, marks=SLOW, id="groups"),
]


@pytest.mark.parametrize("where", JUST_IN_TIME)
def test_a_miss_proposes_a_tree_where_the_draft_is_waited_for(checkpoints, where):
    with opened(checkpoints["qwen3"], 3, 8, backup="draft", budget=2, **where) as llm:
        wanted = requests(llm, "coupled")
        found = outputs(llm, wanted, "ssd")
        assert ids(found) == ids(outputs(llm, wanted, "ar"))
    metrics = [output.metrics for output in found if output.metrics["tree_rounds"]]
    rounds = sum(sum(request["acceptance_histogram"]) for request in metrics)
    assert np.mean([request["hit_rate"] or 0 for request in metrics]) < 0.7
    # The last token of a text has no proposal.
    assert sum(request["tree_rounds"] for request in metrics) >= rounds - len(metrics)


@pytest.mark.parametrize("where", PLACES)
def test_trees_hit_wherever_the_draft_runs(checkpoints, where):
    with opened(checkpoints["qwen3"], 3, 8, **where) as llm:
        wanted = requests(llm, "coupled")
        found = outputs(llm, wanted, "ssd")
        assert ids(found) == ids(outputs(llm, wanted, "ar"))
        assert sum(output.metrics["tree_rounds"] or 0 for output in found) > 8


@pytest.mark.parametrize("where", [pytest.param({}, id="inline"), *PLACES])
def test_sampled_trees_of_the_target_itself_are_accepted_and_their_outcomes_foreseen(
    checkpoints, where
):
    """p / q is 1, and the noise of the bonus token is known: no q and no outcome may get lost."""
    same = checkpoints["qwen3"][0], checkpoints["qwen3"][0]
    with opened(same, 3, 6, verify="ratio", proposal_support="full", **where) as llm:
        params = SamplingParams(max_tokens=30, temperature=0.8, seed=3, ignore_eos=True)
        found = [out.outputs[0].metrics for out in llm.generate(PROMPTS, params)]
    for metrics in found:
        assert metrics["hit_rate"] > 0.5
        assert (metrics["miss_causes"] or {}).get("miss", 0) <= 1  # others came late
        accepted, judged = np.sum(metrics["acceptance_by_position"], axis=0)
        assert accepted > 0.9 * judged  # of what was proposed in time


@pytest.mark.parametrize(
    "where",
    [
        pytest.param({}, marks=SLOW, id="inline"),
        pytest.param(PROCESS, marks=MORE, id="process"),
        pytest.param(BY_SLOTS, marks=SLOW, id="two processes"),
        pytest.param(BY_BRANCHES, marks=SLOW, id="two processes that share branches"),
    ],
)
def test_slots_that_share_pages_are_preempted_and_reuse_prefixes(checkpoints, where):
    with opened(checkpoints["qwen3"], 4, 12, **FEW | where) as llm:
        wanted = asked(llm)
        found = outputs(llm, wanted, "ssd")
        assert ids(found) == ids(outputs(llm, wanted, "ar"))
        assert put_off(found) >= 1
        assert sum(output.metrics["tree_rounds"] for output in found) > 20


@pytest.mark.slow
def test_trees_under_ssd_accept_what_they_accept_in_turn(checkpoints):
    """Where a miss proposes nothing, all other rounds have the trees of mode sd."""
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=3, ignore_eos=True)
    lengths = {}
    for mode in ("sd", "ssd"):
        of_mode = {"sd": {"draft_placement": None}, "ssd": {"budget": 24, "backup": "none"}}
        settings = {"mode": mode} | of_mode[mode]
        with opened(checkpoints["qwen3"], 4, 12, **settings) as llm:
            found = [out.outputs[0].metrics for out in llm.generate(PROMPTS, params)]
        lengths[mode] = np.mean([metrics["acceptance_length"] for metrics in found])
        if mode == "ssd":
            hits = np.mean([metrics["hit_rate"] for metrics in found])
    assert hits > 0.4
    assert lengths["ssd"] > 1 + 0.8 * hits * (lengths["sd"] - 1)


REFUSED = [
    ({"verify": "ratio", "saguaro_c": 0.5}, "saguaro_c = 0.5 is for chains"),
    ({"k": 16, "tree_nodes": 24}, "up to k = 15"),
    ({"fan_out": "measured"}, "fan_out = 'measured' is for chains"),
    ({"budget": "auto"}, "budget = 'auto' is for chains"),
    ({"predict": "plain"}, "predict = 'plain' is for chains"),
    ({"tree_nodes": "auto"}, "give a number of nodes"),
    ({"tree_nodes": 3}, "leaves no node beside a chain"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_trees_do_not_have_under_ssd_is_refused_before_anything_loads(settings, message):
    given = {"k": 4, "tree_nodes": 12, "verify": "coupled"} | settings
    with pytest.raises(InputError, match=message):
        LLM("no such target", mode="ssd", draft="no such draft", **given)
