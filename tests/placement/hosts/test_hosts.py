"""A target of several processes says what it says in one; processes of this machine stand for
hosts."""

from __future__ import annotations

import json

import pytest

from ssd_jax.llm.llm import LLM
from tests.checkpoints import tiny_pair
from tests.models.every_mechanism import AT_ONCE
from tests.placement.hosts.leading import answers, under_a_grammar
from tests.placement.hosts.processes import Processes, results

SHAPE = {"intermediate_size": 48, "vocab_size": 320, "num_attention_heads": 8}
MECHANISMS = {"granite": AT_ONCE}
"""Of a family, what it has beside its own."""
PAGES = {"kv_memory": "320KiB", "page_size": 64}
"""So small that texts get more of them as they grow."""
CHOSEN = {"mode": "auto", "k": "auto", "budget": "auto"}
CASES = [
    ("qwen3", 2, "tensor=4", 2, "coupled", PAGES | {"mode": "auto"}, True),
    ("qwen3", 2, "tensor=4", 2, "coupled", {}, False),
    ("llama", 4, "data=2,tensor=2", 2, "coupled", {}, False),
    ("qwen2", 1, "tensor=4", 2, "ratio", {}, False),
    ("qwen2", 2, "data=4", 2, "coupled", {"kv_memory": "64MiB"}, False),
    ("qwen3", 2, "data=2,tensor=4", 4, "coupled", {"kv_memory": "64MiB"}, False),
    ("llama", 2, "tensor=8", 4, "ratio", {"prefix_caching": True, "kv_memory": "64MiB"}, False),
    ("qwen3", 4, "tensor=4", 2, "ratio", {"exact": "bitwise"}, False),
    ("qwen3", 2, "tensor=4", 2, "coupled", CHOSEN, False),
    ("llama", 2, "data=2,tensor=2", 2, "coupled", CHOSEN, False),
    ("qwen3", 2, "tensor=4", 2, "coupled", {"tree_nodes": 8}, True),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Target and draft of a family with so many key/value heads."""
    root = tmp_path_factory.mktemp("hosts")

    def made(family, heads):
        path = root / f"{family}-{heads}"
        changes = SHAPE | MECHANISMS.get(family, {})
        return tiny_pair.write(path, family, num_key_value_heads=heads, **changes)

    return made


def settings_of(pair, verify, **more):
    usual = {"mode": "ssd", "k": 3, "budget": 8, "context": 320, "slots": 4, "dtype": "float32"}
    usual |= {"compile_cache": "off", "verify": verify}
    return usual | {"target": pair[0], "draft": pair[1]} | more


@pytest.mark.slow  # `tests/launch/test_local.py` has two processes in `make test-more`
@pytest.mark.parametrize(("family", "heads", "mesh", "count", "verify", "more", "few"), CASES)
def test_every_mode_of_several_processes_says_what_one_says(
    pair, family, heads, mesh, count, verify, more, few
):
    """Also what `auto` measures and chooses; one process is told K, M and the mode."""
    settings = settings_of(pair(family, heads), verify, **more)
    leader = json.dumps(settings | {"mesh": mesh})
    settings |= {"mode": "ssd", "k": 3, "budget": 8}
    asked = "tests.placement.hosts.leading", leader, f"--few={few}"
    with Processes(*asked, count=count) as processes:
        with LLM(**settings, draft_placement="inline") as alone:
            expected = answers(alone, verify, few)
        found = results(processes)
    predicted = found.pop("predicted")
    assert [slots for slots, _ in found.pop("batches")] == [4]
    assert found.keys() == expected.keys() == {"ar", "sd", "ssd"}
    for mode in expected:
        assert found[mode] == expected[mode], mode
    chooses = "auto" in more.values()
    assert predicted.keys() == (expected.keys() if chooses else set())
    assert min(predicted.values(), default=1) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "more", "sizes"),
    [
        ("tensor=4", {"mode": "ssd"}, [1]),
        ("data=2,tensor=2", {"mode": "sd", "budget": None}, [2]),
        ("tensor=4", {"mode": "sd", "budget": None, "tree_nodes": 8}, [1]),
    ],
)
def test_several_processes_change_the_sizes_of_their_batches_together(pair, mesh, more, sizes):
    settings = settings_of(pair("qwen3", 2), "coupled", exact="distribution", **more)
    leader = json.dumps(settings | {"mesh": mesh, "batch_sizes": "all"})
    with Processes("tests.placement.hosts.leading", leader, "--few=False") as processes:
        with LLM(**settings, draft_placement="inline") as alone:
            expected = answers(alone, "coupled", False, None)
        found = results(processes)
    assert [slots for slots, _ in found["batches"]] == sizes
    assert {mode: found[mode] for mode in expected} == expected


@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "verify", "where", "more"),
    [
        ("qwen3", "coupled", {"mesh": "tensor=4"}, {}),
        ("granite", "coupled", {"mesh": "data=2,tensor=2", "expert_parallel": True}, {}),
        pytest.param("qwen3", "ratio", {"mesh": "data=2,tensor=2"}, PAGES, marks=pytest.mark.slow),
    ],
)
def test_trees_of_several_processes_say_what_decoding_one_by_one_says(
    pair, family, verify, where, more
):
    settings = settings_of(pair(family, 2), verify, **more)
    settings |= {"mode": "sd", "k": 4, "tree_nodes": 12, "budget": None}
    leader = json.dumps(settings | where)
    with Processes("tests.placement.hosts.leading", leader, "--few=True") as processes:
        with LLM(**settings) as alone:
            expected = answers(alone, verify, True)
        found = results(processes)
    assert {mode: found[mode] for mode in ("ar", "sd")} == expected
    assert [tokens for tokens, *_ in found["sd"]] == [tokens for tokens, *_ in found["ar"]]


@pytest.mark.more
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("tensor=4", {"mode": "sd", "k": 4, "tree_nodes": 12, "budget": None}),
        pytest.param("data=2,tensor=2", {"mode": "sd", "budget": None}, marks=pytest.mark.slow),
        pytest.param("data=4", {"tree_nodes": 8}, marks=pytest.mark.slow),
    ],
    ids=["trees", "chains", "trees of ssd"],
)
def test_texts_under_a_grammar_of_several_processes_are_those_of_one(pair, mesh, more):
    settings = settings_of(pair("qwen3", 2), "coupled", **more)
    leader = json.dumps(settings | {"mesh": mesh})
    place = {"draft_placement": "inline"} if settings["mode"] == "ssd" else {}
    with Processes("tests.placement.hosts.leading", leader, "--grammar=True") as processes:
        with LLM(**settings | place) as alone:
            expected = under_a_grammar(alone)
        found = results(processes)
    assert found == expected
    assert found["sd"] == found["ar"]
    assert {token for text in found["ar"] for token in text[:-1]} <= {*range(40, 60)}
