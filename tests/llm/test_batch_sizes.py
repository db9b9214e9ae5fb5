"""Texts are the same whatever batch sizes rounds run with, and rounds run small ones."""

import numpy as np
import pytest

from ssd_jax.config.config import Config
from ssd_jax.devices.programs.batch_sizes import BatchSizes
from ssd_jax.devices.target.programs import Programs
from ssd_jax.errors import InputError
from ssd_jax.llm.llm import LLM
from ssd_jax.loading import load as loading
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.sampling.structured_outputs import StructuredOutputsParams
from tests.checkpoints import tiny_pair
from tests.llm.paged import SHAPE
from tests.llm.runs import PROMPTS, ids, outputs, requests

MORE, SLOW = pytest.mark.more, pytest.mark.slow
SLOTS = 5
INLINE = {"mode": "ssd", "draft_placement": "inline", "budget": 6}
CASES = [
    pytest.param({"mode": "sd"}, id="sd"),
    pytest.param({"mode": "sd", "draft": "ngram", "dtype": "bfloat16"}, id="ngram, bitwise"),
    pytest.param({"mode": "sd", "k": "auto"}, marks=MORE, id="sd, k auto"),
    pytest.param({"mode": "sd", "tree_nodes": 6}, marks=MORE, id="sd, trees"),
    pytest.param(INLINE, id="ssd"),
    pytest.param(INLINE | {"tree_nodes": 6, "budget": 4}, marks=MORE, id="ssd, trees"),
    pytest.param(INLINE | {"backup": "draft"}, marks=SLOW, id="ssd, just in time"),
    pytest.param(INLINE | {"kv_memory": "1MiB", "page_size": 64}, marks=MORE, id="ssd, pages"),
    pytest.param({"mode": "ssd", "draft_placement": "process"}, marks=MORE, id="process"),
    pytest.param({"mode": "sd", "mesh": "data=2", "slots": 6}, marks=SLOW, id="groups"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("sizes"), "qwen3", **SHAPE)


def opened(pair, **settings):
    defaults = {"mode": "ar", "context": 320, "slots": SLOTS, "dtype": "float32"}
    if settings.get("mode", "ar") != "ar":
        defaults |= {"draft": pair[1], "k": 3}
    defaults |= {"verify": "coupled"}
    return LLM(pair[0], compile_cache="off", **defaults | settings)


def used(found):
    """Numbers of slots that rounds ran."""
    return {slots for output in found for slots, _ in output.metrics["batch_sizes"] or ()}


@pytest.fixture
def chosen(monkeypatch):
    """Sizes that rounds of target and draft were given, by task."""
    seen, choose = {}, BatchSizes.choose

    def noting(self, rows, *tasks):
        size = choose(self, rows, *tasks)
        seen.setdefault(tasks[0], set()).add(size)
        return size

    monkeypatch.setattr(BatchSizes, "choose", noting)
    return seen


@pytest.mark.parametrize("settings", CASES)
def test_texts_and_proposals_are_those_of_rounds_over_all_slots(pair, settings, chosen):
    groups = 2 if "mesh" in settings else 1
    with opened(pair, batch_sizes="off", **settings) as llm:
        asked = requests(llm, "coupled")
        alone, wanted = ids(outputs(llm, asked, "ar")), outputs(llm, asked)
        assert used(wanted) == {llm.loaded.programs.slots}
    chosen.clear()
    sizes = "all" if "mesh" in settings else [1, 3]
    with opened(pair, batch_sizes=sizes, **settings) as llm:
        assert ids(outputs(llm, asked, "ar")) == alone
        found = outputs(llm, asked)
        assert ids(found) == alone
        if settings.get("draft_placement") != "process" and settings.get("k") != "auto":
            assert figures(found) == figures(wanted)
        assert groups in used(found)
        assert len(used(found)) > 2
        assert llm.loaded.programs.batch_sizes.sizes[0] == 1  # none was dropped
    of_draft = {"branches", "trees"} & set(chosen)
    assert all(1 in chosen[task] for task in of_draft)
    if settings.get("draft_placement") == "inline":
        assert of_draft == {"trees" if "tree_nodes" in settings else "branches"}


def figures(found):
    """What was proposed, and what became of it, where that does not depend on time."""
    names = "acceptance_histogram", "hit_rate"
    return [[output.metrics[name] for name in names] for output in found]


@pytest.mark.more
def test_sampled_texts_that_end_above_others_end_as_in_rounds_over_all_slots(pair):
    """Under ratio, where what such a row proposed before must not be judged a second time."""
    texts = []
    for sizes in ("off", "all"):
        with opened(pair, mode="sd", verify="ratio", batch_sizes=sizes) as llm:
            texts.append([])
            for seed in range(6):
                sampled = {"temperature": 1.0, "seed": seed, "ignore_eos": True}
                ends = [40, *range(2, 1 + SLOTS)]
                params = [SamplingParams(max_tokens=end, **sampled) for end in ends]
                texts[-1] += [output.token_ids for output in llm.generate(PROMPTS[:SLOTS], params)]
    assert texts[0] == texts[1]


def test_sizes_are_compiled_while_requests_run_and_then_used(pair):
    with opened(pair) as llm:
        asked, sizes = requests(llm, "coupled"), llm.loaded.programs.batch_sizes
        sizes._patience = 1e9
        first = outputs(llm, asked)
        assert used(first) == {SLOTS}
        sizes._patience = 0
        for _ in range(2):  # the smallest size, whose round is the last, is compiled alone
            assert ids(outputs(llm, asked)) == ids(first)
            sizes.join()
        last = outputs(llm, asked)
        assert ids(last) == ids(first)
        assert min(used(last)) < SLOTS


@pytest.mark.more
def test_where_times_choose_the_mode_sizes_come_for_all_that_it_may_choose(pair):
    settings = {"mode": "auto", "draft_placement": "inline", "k": 3, "budget": 6, "slots": 2}
    with opened(pair, **settings) as llm:
        asked = requests(llm, "coupled")
        alone = ids(outputs(llm, asked, "ar"))
        programs = llm.loaded.programs
        of_draft = llm.loaded.inline.branching()
        kinds = [programs, of_draft[0].base, *of_draft]
        for kind in kinds:
            kind.batch_sizes._patience = 0
        for _ in range(4):
            for mode in ("auto", "ar", "sd", "ssd"):
                assert ids(outputs(llm, asked, mode)) == alone
            for kind in kinds:
                kind.batch_sizes.join()
        assert all(programs.batch_sizes.ready(1, width) for width in programs.widths)
        assert used(outputs(llm, asked[:1], "ssd")) == {1}
        assert of_draft[0].batch_sizes.ready(1, "branches")


EXTRAS = [{"logprobs": 2}, {"structured_outputs": StructuredOutputsParams(regex="(ab|[0-9]){6,9}")}]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"logprobs_of": "processed"}, marks=MORE),
        pytest.param({"tree_nodes": 5}, marks=MORE),
        pytest.param({"tree_nodes": 5, "logprobs_of": "processed"}, marks=SLOW),
    ],
    ids=str,
)
def test_rounds_with_log_probabilities_or_a_grammar_run_few_slots_too(pair, settings):
    """Their programs of a size come once such rounds want them; the results are the same."""
    pytest.importorskip("llguidance")
    with opened(pair, mode="sd", slots=2, batch_sizes="all", **settings) as llm:
        params = [EXTRAS[0] | {"ignore_eos": True}, EXTRAS[1], EXTRAS[0] | EXTRAS[1]]
        asked = [
            llm.request(prompt, SamplingParams(temperature=0.8, seed=3, max_tokens=12, **more), 4)
            for prompt, more in zip(PROMPTS, params, strict=False)
        ]
        sizes = llm.loaded.programs.batch_sizes
        sizes._patience = 1e9

        def found():
            return [output for request in asked for output in outputs(llm, [request])]

        first = found()
        assert used(first) == {2}
        assert ids(first) == [ids(outputs(llm, [request], "ar"))[0] for request in asked]
        sizes._patience, again = 0, first
        for _ in range(12):  # some compile, then some are on trial
            if not all(used([output]) == {1} for output in again):
                again = found()
            sizes.join()
            assert ids(again) == ids(first)
            for one, other in zip(again, first, strict=True):
                assert chosen_logprobs(one) == pytest.approx(chosen_logprobs(other), abs=1e-4)
        assert all(used([output]) == {1} for output in again)


def chosen_logprobs(output):
    return [entry.logprob for entry in output.logprobs or ()]


class OneBit(Programs):
    """Programs of which those of one batch size are off by the last bit of a single logit."""

    def __getitem__(self, name):
        program = super().__getitem__(name)

        def perturbed(*arguments):
            logits, pages = program(*arguments)
            next_to_it = np.nextafter(np.asarray(logits)[0, 5], np.float32(np.inf))
            return logits.at[0, 5].set(next_to_it), pages

        return perturbed if name == ("forward", 0, "batch 1") else program


@pytest.mark.more
def test_a_size_with_another_bit_is_not_used_in_the_bitwise_mode(pair, monkeypatch, caplog):
    monkeypatch.setattr(loading, "Programs", OneBit)
    with opened(pair, batch_sizes="all", dtype="bfloat16", slots=3) as llm:
        assert llm.loaded.exact == "bitwise"
        asked = requests(llm, "coupled")
        outputs(llm, asked)
        assert llm.loaded.programs.batch_sizes.sizes == (2, 3)
    assert "batches of 1 are not used" in caplog.text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("some", "batch_sizes = 'some' is not understood; give auto, all, off or a list"),
        ("2,5", "batch_sizes = '2,5': 5 is not below the 5 slots"),
        ([0], "batch_sizes = '0' is not understood"),
    ],
)
def test_sizes_that_are_not_possible_are_refused(pair, value, message):
    with pytest.raises(InputError, match=message):
        opened(pair, batch_sizes=value, load=False)


@pytest.mark.parametrize(("asked", "sizes"), [("auto", ()), ("off", ()), ("all", (1, 2, 4))])
def test_hosts_have_the_sizes_that_all_of_them_compile_at_the_start(asked, sizes):
    config = Config(target="t", slots=5, batch_sizes=asked, hosts="localhost:1,count=2")
    assert config.smaller_batches == sizes
