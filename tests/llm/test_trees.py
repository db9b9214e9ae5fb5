"""Trees of proposed tokens on tiny models: the text of decoding token by token."""

import numpy as np
import pytest

from ssd_jax.config import derived
from ssd_jax.errors import InputError
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tuning import tree_choice, trees
from ssd_jax.tuning.role_runs import draft_run, varied_proposals, verify_run
from tests.llm import tree_models
from tests.llm.bitwise import skip_unless_bitwise
from tests.llm.preempted import FEW, asked, put_off
from tests.llm.runs import PROMPTS, ids, outputs, requests

SLOW, MORE = pytest.mark.slow, pytest.mark.more
CASES = [
    pytest.param("qwen3", "float32", "coupled", 4, 12),
    pytest.param("llama", "bfloat16", "ratio", 3, 8, marks=MORE),
    pytest.param("llama", "bfloat16", "coupled", 8, 31, marks=MORE),
    pytest.param("qwen2", "int8", "coupled", 1, 6, marks=SLOW),
    pytest.param("qwen2", "float32", "ratio", 12, 16, marks=SLOW),
    pytest.param("qwen3", "int8", "ratio", 2, 31, marks=SLOW),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tree_models.write(tmp_path_factory.mktemp("trees"))


def opened(pair, k, nodes, **settings):
    return tree_models.opened(pair, k, nodes, mode="sd", **settings)


@pytest.mark.parametrize(("family", "dtype", "verify", "k", "nodes"), CASES)
def test_text_and_logprobs_of_trees_equal_autoregressive_decoding(
    checkpoints, family, dtype, verify, k, nodes
):
    skip_unless_bitwise(dtype)
    with opened(checkpoints[family], k, nodes, dtype=dtype, verify=verify, exact="bitwise") as llm:
        assert llm.loaded.exact == "bitwise"
        asked = requests(llm, verify, logprobs=2)
        alone, spoken = outputs(llm, asked, "ar"), outputs(llm, asked, "sd")
        for one, other in zip(alone, spoken, strict=True):
            assert one.token_ids == other.token_ids
            assert one.finish_reason == other.finish_reason
            assert one.logprobs == other.logprobs
        metrics = [output.metrics for output in spoken if output.metrics["tree_rounds"]]
        assert metrics
        assert max(len(row["acceptance_histogram"]) for row in metrics) > 1  # a node was taken


@pytest.mark.more
def test_processed_logprobs_of_trees_are_those_of_autoregressive_decoding(checkpoints):
    with opened(checkpoints["qwen3"], 3, 8, logprobs_of="processed") as llm:
        asked = requests(llm, "coupled", logprobs=3)
        for one, other in zip(outputs(llm, asked, "ar"), outputs(llm, asked, "sd"), strict=True):
            assert one.token_ids == other.token_ids
            for first, second in zip(one.logprobs, other.logprobs, strict=True):
                assert [token for token, _ in first.top] == [token for token, _ in second.top]
                values = [[value for _, value in entry.top] for entry in (first, second)]
                np.testing.assert_allclose(*values, atol=1e-4)


@pytest.mark.more
def test_trees_accept_more_than_the_chain_of_their_depth(checkpoints):
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=3, ignore_eos=True)
    lengths = {}
    for nodes in (0, 16):
        with opened(checkpoints["qwen3"], 4, nodes) as llm:
            found = [out.outputs[0].metrics for out in llm.generate(PROMPTS, params)]
        lengths[nodes] = np.mean([metrics["acceptance_length"] for metrics in found])
        rounds = [metrics["tree_rounds"] for metrics in found]
        assert all(rounds) if nodes else rounds == [None] * len(PROMPTS)
    assert lengths[16] > 1.1 * lengths[0]


@pytest.mark.parametrize(
    "options",
    [
        {"verify": "ratio"},
        pytest.param({"verify": "block"}, marks=MORE),
        pytest.param({"verify": "ratio", "draft_temperature": 0.0}, marks=SLOW),
    ],
)
def test_a_sampled_tree_of_a_fixed_shape_is_the_same_alone_and_beside_others(checkpoints, options):
    settings = {"max_tokens": 40, "ignore_eos": True}
    greedy = SamplingParams(**settings)
    sampled = [SamplingParams(temperature=0.8, seed=seed, **settings) for seed in (1, 2)]
    with opened(checkpoints["qwen3"], 3, 12, **options) as llm:
        asked = [
            llm.request(prompt, params, index)
            for index, (prompt, params) in enumerate(
                zip(PROMPTS[1:4], [sampled[0], greedy, sampled[1]], strict=True)
            )
        ]
        together = outputs(llm, asked, "sd")
        alone = [outputs(llm, [request], "sd")[0] for request in asked]
        (plain,) = outputs(llm, asked[1:2], "ar")
    assert ids(together) == ids(alone)
    assert together[1].token_ids == plain.token_ids
    metrics = [found.metrics for found in together]
    assert all(metric["tree_rounds"] for metric in metrics)
    assert all(len(metric["acceptance_histogram"]) > 1 for metric in metrics)


@pytest.mark.more
def test_slots_that_share_pages_are_preempted_and_reuse_prefixes_under_trees(checkpoints):
    with opened(checkpoints["qwen3"], 4, 12, **FEW) as llm:
        requested = asked(llm)
        found = outputs(llm, requested, "sd")
        assert ids(found) == ids(outputs(llm, requested, "ar"))
        assert put_off(found) >= 2


@pytest.mark.more
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", pytest.param("tensor=2", marks=SLOW)])
def test_trees_on_a_mesh_say_what_they_say_on_one_device(checkpoints, mesh):
    texts = {}
    for where in (None, mesh):
        with opened(checkpoints["qwen3"], 3, 9, slots=4, mesh=where) as llm:
            found = outputs(llm, requests(llm, "coupled"), "sd")
            texts[where] = ids(found)
            assert any(output.metrics["tree_rounds"] for output in found)
    assert texts[mesh] == texts[None]


@pytest.mark.more
def test_rounds_of_trees_can_be_timed(checkpoints):
    with opened(checkpoints["llama"], 3, 9) as llm:
        loaded = llm.local
        roles = loaded.roles("sd", 3)
        proposals = varied_proposals(loaded.programs, 3, [3])
        ids = loaded.programs.ids
        verify_run(roles.target, proposals, ids=ids, trees=True)(3)
        draft_run(roles.drafter, 3, llm.context, ids=ids)()
        assert roles.drafter.proposal().length.tolist() == [9] * 3


@pytest.mark.more
def test_a_tree_fits_texts_that_end_at_the_context(checkpoints):
    with opened(checkpoints["llama"], 4, 12, context=48, slots=2) as llm:
        asked = [
            llm.request([5] * size, SamplingParams(max_tokens=None, ignore_eos=True), size)
            for size in (3, 30, 46, 47)
        ]
        spoken, alone = outputs(llm, asked, "sd"), outputs(llm, asked, "ar")
    assert ids(spoken) == ids(alone)
    assert [len(output.token_ids) for output in spoken] == [45, 18, 2, 1]


@pytest.mark.more
@pytest.mark.parametrize(("factor", "nodes"), [(1.0, 31), (9.0, 0)])
def test_the_tree_or_chain_that_is_chosen_says_what_plain_decoding_says(
    checkpoints, monkeypatch, factor, nodes
):
    """Rounds of trees are said to take as long as the chain's, or longer; both say what is so."""
    monkeypatch.setattr(trees, "measure_tree", lambda chain, tree: factor)
    monkeypatch.setattr(tree_choice, "tree_round", lambda costs, k, m: costs.trees.get(m, 1e-9))
    with opened(checkpoints["qwen3"], 3, "auto") as llm:
        requested = requests(llm, "coupled", logprobs=2)
        spoken = outputs(llm, requested, "sd")
        assert ids(spoken) == ids(outputs(llm, requested, "ar"))
        assert llm.resolved.nodes == nodes
        assert f"takes {'a tree of 31' if nodes else 'the chain'}: " in llm.choice
        assert any(output.metrics["tree_rounds"] for output in spoken) == bool(nodes)
        guess, before = llm._chooser._observations.guess, llm._chooser._guess
        assert guess.judged > before.judged
        assert (guess.ranks is not None) == bool(nodes)


@pytest.mark.more
def test_a_choice_by_measured_times_does_not_show_in_sampled_text(checkpoints, monkeypatch):
    monkeypatch.setattr(derived, "AUTO_NODES", (7,))
    monkeypatch.setattr(trees, "measure_tree", lambda chain, tree: 1.0)
    monkeypatch.setattr(tree_choice, "tree_round", lambda costs, k, m: costs.trees.get(m, 1e-9))
    params, texts = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True), []
    for nodes in (0, "auto"):
        with opened(checkpoints["qwen3"], 3, nodes, verify="ratio") as llm:
            texts.append([out.outputs[0].token_ids for out in llm.generate(PROMPTS[1:4], params)])
            assert llm.resolved.nodes == (7 if nodes else 0)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "ar", "draft": None}, "tree_nodes = 12 means nothing with mode = 'ar'"),
        ({"mode": "auto"}, "tree_nodes = 12 is for mode = 'sd' and 'ssd', and this is 'auto'"),
        ({"draft": "ngram"}, "tree_nodes = 12 means nothing with draft = 'ngram'"),
        ({"k": "auto"}, "tree_nodes = 12 needs a number for k"),
        ({"k": 12}, "leaves no node beside a chain of k = 12"),
        ({"k": 1}, "tree_nodes = 12 is more than the 6 nodes that a tree of paths of k = 1 may"),
        ({"k": 1, "tree_nodes": "auto"}, "tree_nodes = 'auto' is more than the 6 nodes"),
        ({"tree_nodes": 32}, "tree_nodes = 32 is impossible"),
        (
            {"draft_placement": "process"},
            "draft_placement = 'process' means nothing with mode = 'sd'",
        ),
        ({"draft": lambda setup: None}, "tree_nodes = 12 is for a draft model"),
        ({"exact": "bitwise", "attention": "xla"}, "tree_nodes = 12 and attention = 'xla', which"),
    ],
)
def test_a_tree_that_is_not_possible_is_refused_before_weights_load(checkpoints, settings, message):
    target, draft = checkpoints["llama"]
    given = {"mode": "sd", "draft": draft, "tree_nodes": 12, "verify": "coupled"} | settings
    with pytest.raises(InputError, match=message):
        LLM(target, load=False, **{name: value for name, value in given.items() if value})
