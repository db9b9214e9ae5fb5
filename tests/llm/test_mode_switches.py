"""Engines whose rounds do with and without their draft by turns say what decoding alone says."""

import pytest

from ssd_jax.llm.llm import LLM
from ssd_jax.tuning import goodput
from tests.checkpoints import tiny_pair
from tests.fakes.whimsical import Whimsical
from tests.llm.paged import SHAPE
from tests.llm.preempted import FEW, asked, put_off
from tests.llm.runs import ids, outputs, requests

MORE, SLOW = pytest.mark.more, pytest.mark.slow
INLINE = {"mode": "ssd", "draft_placement": "inline", "budget": 6}
CASES = [
    pytest.param({"mode": "sd"}, id="sd"),
    pytest.param({"mode": "sd", "k": "auto"}, marks=MORE, id="sd, k auto"),
    pytest.param({"mode": "sd", "draft": "ngram"}, id="ngram"),
    pytest.param({"mode": "sd", "tree_nodes": 6}, marks=MORE, id="sd, trees"),
    pytest.param(INLINE, id="ssd"),
    pytest.param(INLINE | {"tree_nodes": 6, "budget": 4}, marks=MORE, id="ssd, trees"),
    pytest.param(INLINE | {"backup": "draft"}, marks=SLOW, id="ssd, just in time"),
    pytest.param({"mode": "ssd", "draft_placement": "process"}, marks=MORE, id="process"),
    pytest.param(
        {"mode": "ssd", "draft_placement": "process", "draft_workers": 2}, marks=SLOW, id="two"
    ),
    pytest.param(
        {"mode": "ssd", "draft_placement": "submesh", "draft_devices": "2", "target_devices": "1"},
        marks=SLOW,
        id="submesh",
    ),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("switches"), "qwen3", **SHAPE)


def opened(pair, settings):
    defaults = {"draft": pair[1], "k": 3, "context": 320, "slots": 3, "dtype": "float32"}
    return LLM(pair[0], verify="coupled", compile_cache="off", **defaults | settings)


@pytest.mark.parametrize("settings", CASES)
def test_texts_are_those_of_decoding_alone(pair, settings):
    with opened(pair, settings) as llm:
        wanted = requests(llm, "coupled")
        alone = ids(outputs(llm, wanted, "ar"))
        accepted = []
        for seed in range(3):
            llm.engine._planner = Whimsical(seed)
            found = outputs(llm, wanted, None)
            assert ids(found) == alone
            accepted += [output.metrics["acceptance_length"] for output in found]
        assert max(length for length in accepted if length is not None) > 1


@pytest.mark.more
def test_pages_that_are_shared_and_taken_away_say_the_same(pair):
    with opened(pair, INLINE | FEW) as llm:
        wanted = asked(llm)
        alone = ids(outputs(llm, wanted, "ar"))
        llm.engine._planner = Whimsical(7)
        found = outputs(llm, wanted, None)
        assert ids(found) == alone
        assert put_off(found) >= 1


def test_requests_with_and_without_a_draft_in_one_batch_say_the_same(pair):
    with opened(pair, INLINE) as llm:
        wanted = requests(llm, "coupled")
        alone = ids(outputs(llm, wanted, "ar"))
        both = [
            request if place % 2 else type(request)(**vars(request) | {"k": 0})
            for place, request in enumerate(wanted)
        ]
        found = outputs(llm, both, None)
        assert ids(found) == alone
        modes = [output.metrics["mode"] for output in found]
        assert modes == ["ssd" if place % 2 else "ar" for place in range(len(wanted))]


def test_mode_auto_does_without_the_draft_where_that_is_faster_and_says_so(pair, monkeypatch):
    monkeypatch.setattr(goodput, "INTERVAL", 4)
    monkeypatch.setattr(goodput, "LOSS", 1)  # trials come soon, however slow one was
    with opened(pair, INLINE | {"mode": "auto"}) as llm:
        llm.load()
        llm._chooser.mode = "sd"  # whatever this machine prefers
        wanted = requests(llm, "coupled")
        alone = ids(outputs(llm, wanted, "ar"))
        plain_rounds = 0
        for _ in range(3):
            found = outputs(llm, wanted, None)
            assert ids(found) == alone
            plain_rounds += sum(output.metrics["plain_rounds"] or 0 for output in found)
        assert plain_rounds > 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(INLINE, id="chains"),
        pytest.param(INLINE | {"tree_nodes": 6, "budget": 4}, marks=MORE, id="trees"),
        pytest.param({"mode": "ssd", "draft_placement": "process"}, marks=MORE, id="process"),
    ],
)
def test_mode_sd_of_an_engine_with_branches_is_that_of_one_without(pair, settings):
    trees = {name: value for name, value in settings.items() if name == "tree_nodes"}
    with opened(pair, {"mode": "sd"} | trees) as llm:
        wanted = requests(llm, "coupled")
        separate = outputs(llm, wanted, None)
    with opened(pair, settings) as llm:
        found = outputs(llm, wanted, "sd")
        assert len(llm._engines) == 1
        mixed = [
            request if place % 2 else type(request)(**vars(request) | {"branches": False})
            for place, request in enumerate(wanted)
        ]
        both = outputs(llm, mixed, None)
    assert ids(found) == ids(both) == ids(separate)
    for place, (output, alone, mixed_output) in enumerate(zip(found, separate, both, strict=True)):
        assert (output.metrics["mode"], output.metrics["hit_rate"]) == ("sd", None)
        # As many tokens: no key of a token that was drafted and accepted is missing.
        assert output.metrics["acceptance_histogram"] == alone.metrics["acceptance_histogram"]
        assert mixed_output.metrics["mode"] == ("ssd" if place % 2 else "sd")
