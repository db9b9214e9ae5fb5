"""Texts are the same whatever batch sizes rounds run with, and rounds run small ones."""

import numpy as np
import pytest

from ssd_jax.devices.target import DeviceTarget
from ssd_jax.devices.target_programs import Programs
from ssd_jax.errors import InputError
from ssd_jax.llm.llm import LLM
from ssd_jax.loading import load as loading
from ssd_jax.sampling.params import SamplingParams
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


@pytest.fixture
def used(monkeypatch):
    """Sizes that target rounds ran with."""
    seen, forward = set(), DeviceTarget._forward

    def noting(self, width, pending, lengths, tokens, size):
        seen.add(size)
        return forward(self, width, pending, lengths, tokens, size)

    monkeypatch.setattr(DeviceTarget, "_forward", noting)
    return seen


@pytest.mark.parametrize("settings", CASES)
def test_texts_and_proposals_are_those_of_rounds_over_all_slots(pair, settings, used):
    with opened(pair, batch_sizes="off", **settings) as llm:
        asked = requests(llm, "coupled")
        alone, wanted = ids(outputs(llm, asked, "ar")), outputs(llm, asked)
        assert used == {llm.loaded.programs.local_slots}
    with opened(pair, batch_sizes="all", **settings) as llm:
        assert ids(outputs(llm, asked, "ar")) == alone
        found = outputs(llm, asked)
        assert ids(found) == alone
        if settings.get("draft_placement") != "process" and settings.get("k") != "auto":
            assert figures(found) == figures(wanted)
        assert 1 in used
        assert len(used) > 2
        assert llm.loaded.programs.batch_sizes.sizes[0] == 1  # none was dropped


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


def test_sizes_are_compiled_while_requests_run_and_then_used(pair, used):
    with opened(pair) as llm:
        asked = requests(llm, "coupled")
        first = ids(outputs(llm, asked))
        assert used == {SLOTS}
        sizes = llm.loaded.programs.batch_sizes
        sizes._patience = 0
        for _ in range(2):  # the smallest size, whose round is the last, is compiled alone
            assert ids(outputs(llm, asked)) == first
            sizes.join()
        assert ids(outputs(llm, asked)) == first
        assert min(used) < SLOTS


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


def test_hosts_run_all_slots_and_refuse_other_sizes(pair):
    with pytest.raises(InputError, match="batch_sizes = '1': with hosts every round runs all"):
        opened(pair, batch_sizes="1", hosts="localhost:1,count=2", load=False)
