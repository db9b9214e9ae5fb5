"""SSD on tiny models says what autoregressive decoding says, whatever is prepared or hits.

Every factor below meets every other one in some case.
"""

import itertools

import numpy as np
import pytest

from ssd_jax.devices.branches import branching
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_pair
from tests.llm.policies import by_policy
from tests.llm.runs import outputs, requests
from tests.selection import cases

FACTORS = {
    "family": ("llama", "qwen2", "qwen3"),
    "dtype": ("float32", "bfloat16", "int8"),
    "verify": ("ratio", "block", "coupled"),
    "slots": (1, 4),
    "predict": ("noise", "plain"),
}
ENGINES = [
    # the factors; then K and M
    ("llama", "float32", "coupled", 4, "noise", 3, 8),
    ("llama", "bfloat16", "ratio", 1, "noise", 2, 6),
    ("llama", "int8", "coupled", 1, "plain", 4, 7),
    ("qwen2", "float32", "ratio", 4, "noise", 2, 6),
    ("qwen2", "bfloat16", "coupled", 1, "noise", 3, 8),
    ("qwen2", "int8", "ratio", 4, "plain", 1, 4),
    ("qwen3", "float32", "ratio", 1, "plain", 5, 16),
    ("qwen3", "bfloat16", "ratio", 4, "plain", 4, 2),
    ("qwen3", "int8", "coupled", 4, "noise", 2, 5),
    ("llama", "float32", "block", 1, "plain", 3, 8),
    ("qwen2", "bfloat16", "block", 4, "noise", 2, 6),
    ("qwen3", "int8", "block", 1, "noise", 4, 7),
]
FIRST = 1
"""What the engine `many` is not; the others are slow to run."""
IN_W8A8 = (FIRST, 5)
"""Whose drafts compute in another dtype than their targets."""
BACKUPS = ("none", "ngram", "random", "draft")
FAN_OUTS = ("uniform", "geometric", "list")


def policies(row):
    """Every backup, each with another fan-out than in the next row; no program depends on them."""
    return [(backup, FAN_OUTS[(row + n) % 3]) for n, backup in enumerate(BACKUPS)]


def listed(k, budget):
    """One branch for each k as far as they go, the others for k = 0 and after a miss for k = K."""
    counts = [int(n == k or n < budget - 1) for n in range(k + 1)]
    left = budget - sum(counts)
    after_miss = [*counts[:-1], counts[-1] + left]
    counts[0] += left
    return "/".join(",".join(map(str, numbers)) for numbers in (counts, after_miss))


def test_the_cases_cover_every_pair_of_factors():
    cases = [(*engine[:5], policy) for n, engine in enumerate(ENGINES) for policy in policies(n)]
    for one, other in itertools.combinations(range(5), 2):
        names = list(FACTORS)
        missing = set(itertools.product(FACTORS[names[one]], FACTORS[names[other]])) - {
            (case[one], case[other]) for case in cases
        }
        assert not missing, (names[one], names[other])
    assert {case[5] for case in cases} == {*itertools.product(BACKUPS, FAN_OUTS)}
    for place, name in enumerate(FACTORS):
        for value in FACTORS[name]:
            backups, fan_outs = zip(*(c[5] for c in cases if c[place] == value), strict=True)
            assert {*backups} == {*BACKUPS}
            assert {*fan_outs} == {*FAN_OUTS}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(target, draft that agrees with it more often than not) of each family."""
    root = tmp_path_factory.mktemp("ssd")
    return {family: tiny_pair.write(root / family, family) for family in FACTORS["family"]}


def ssd(checkpoint, **settings):
    target, draft = checkpoint
    defaults = {"context": 320, "compile_cache": "off", "exact": "bitwise", "k": "3"}
    defaults["draft_placement"] = "inline"
    return LLM(str(target), mode="ssd", draft=str(draft), **defaults | settings)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            marks=pytest.mark.more if row == FIRST else pytest.mark.slow,
            id="-".join(map(str, engine)),
        )
        for row, engine in enumerate(ENGINES)
    ],
)
def test_text_and_logprobs_equal_autoregressive_decoding(checkpoints, row):
    family, dtype, verify, slots, predict, k, budget = ENGINES[row]
    llm = ssd(
        checkpoints[family],
        dtype=dtype,
        draft_dtype="w8a8" if row in IN_W8A8 else None,
        verify=verify,
        slots=slots,
        predict=predict,
        k=str(k),
        budget=str(budget),
    )
    asked = requests(llm, verify, logprobs=1)
    alone, rates = outputs(llm, asked, "ar"), []
    for backup, fan_out in policies(row):
        listing = listed(k, budget) if fan_out == "list" else fan_out
        spoken = by_policy(llm, asked, backup=backup, fan_out=listing)
        for one, other in zip(alone, spoken, strict=True):
            assert one.token_ids == other.token_ids, (backup, fan_out)
            assert one.finish_reason == other.finish_reason
            assert one.logprobs == other.logprobs
        metrics = [out.metrics for out in spoken if out.metrics["hit_rate"] is not None]
        rates.append(np.mean([metric["hit_rate"] for metric in metrics]))
        assert any(metric["acceptance_by_position"] for metric in metrics)
    assert 0 < np.mean(rates) < 1  # both a hit and a miss were taken


@pytest.fixture(scope="module")
def many(checkpoints):
    """Its programs report confidence, so that they serve every fan-out; K = 2 is prepared, too."""
    settings = {"budget": "8", "dtype": "float32", "verify": "coupled", "fan_out": "confidence"}
    return ssd(checkpoints["qwen3"], slots=4, ks=(2,), **settings)


@pytest.fixture(scope="module")
def alone(many):
    """What autoregressive decoding says."""
    return [output.token_ids for output in outputs(many, asked(many), "ar")]


POLICIES = [
    *(("uniform", "draft"), ("geometric", "ngram")),
    *(("measured", "random"), ("confidence", "none")),
]


@pytest.mark.parametrize(
    ("fan_out", "backup"), cases(POLICIES, ("geometric", "ngram"), ("confidence", "none"))
)
def test_every_fan_out_says_what_autoregressive_decoding_says(many, alone, fan_out, backup):
    spoken = by_policy(many, asked(many), fan_out=fan_out, backup=backup)
    assert alone == [other.token_ids for other in spoken]
    rates = [output.metrics["hit_rate"] for output in spoken]
    assert 0 < np.mean([rate for rate in rates if rate is not None]) < 1


def test_a_sampled_text_is_the_targets_own_in_any_company(many, alone):
    """Coupled text is a function of seed, index and prompt: slots and neighbours do not enter."""
    for request, expected in zip(asked(many), alone, strict=True):
        assert outputs(many, [request], "sd")[0].token_ids == expected


@pytest.mark.more
def test_a_draft_that_is_the_target_hits_and_is_accepted_always(checkpoints):
    """Branches propose what the draft would have said: nothing else is accepted always.

    Of sampled text, too, one branch for k = L is enough: it has the token that the noise draws.
    """
    target, _ = checkpoints["qwen3"]
    llm = ssd((target, target), dtype="float32", budget="8", slots=1)
    settings = {"max_tokens": 60, "ignore_eos": True}
    filters = {"temperature": 0.7, "top_k": 60, "top_p": 0.9}  # ids that its q has room for
    for sampled in ({}, {"temperature": 1.0, "top_k": 40, "seed": 3}, filters):
        params = SamplingParams(**settings, **sampled)
        (output,) = by_policy(llm, [llm.request("0101010101", params)], budget="2")
        assert output.metrics["hit_rate"] == 1
        accepted, judged = np.array(output.metrics["acceptance_by_position"]).T
        np.testing.assert_array_equal(accepted, judged)


def test_with_a_just_in_time_draft_rounds_accept_nearly_what_sd_accepts(many):
    """Branches of k < L and just-in-time drafts are the same function of the text.

    Greedy alone: sampled drafts differ, since rounds start elsewhere.
    """
    params = SamplingParams(max_tokens=40)
    prompts = ["to be or not to be", "xyxyxyxyxyxyxyxy", "one two three"]
    sd, spoken = (many.generate(prompts, params, mode=mode) for mode in ("sd", "ssd"))
    for one, other in zip(sd, spoken, strict=True):
        assert one.token_ids == other.token_ids
        # A branch of k = L proposes one token less.
        lengths = (output.metrics["acceptance_length"] for output in (one, other))
        assert 0 <= next(lengths) - next(lengths) < 1


def test_arrivals_and_cancels_in_the_middle_change_no_ones_text(many, alone):
    expected = dict(enumerate(alone))
    stream = many.run(asked(many)[:3], "ssd")
    found, others = {}, iter(())
    for count, event in enumerate(stream):
        if event.output is not None:
            found[event.prompt_index] = event.output.token_ids
        if count == 4:  # these three share their rounds with four more from here on
            others = many.run(asked(many)[3:], "ssd")
            cancelled = many.run([asked(many)[6]], "ssd")
            next(cancelled)
            cancelled.close()
        other = next(others, None)
        if other is not None and other.output is not None:
            found[other.prompt_index] = other.output.token_ids
    found |= {e.prompt_index: e.output.token_ids for e in others if e.output is not None}
    assert found == expected


def asked(llm):
    return requests(llm, "coupled")


def test_text_up_to_the_last_position_of_the_context(many):
    """The tree shrinks: no branch proposes more than there is room for."""
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    limit = many.context
    for left in (30, 5, 4, 3, 2, 1):
        prompt = [[1 + token % 90 for token in range(limit - left)]]
        plain, spoken = (many.generate(prompt, params, mode=mode)[0] for mode in ("ar", "ssd"))
        assert plain.token_ids == spoken.token_ids
        assert len(spoken.token_ids) == left
        assert spoken.finish_reason == "length"


@pytest.mark.more
def test_a_shuffled_predictor_changes_speed_only(checkpoints, alone, monkeypatch):
    right = branching.tail_bonus_tokens, branching.early_bonus_tokens

    def others(candidates):
        return (candidates + 17) % tiny.TOKENS

    def elsewhere(record):
        return record._replace(candidates=others(record.candidates))

    monkeypatch.setattr(branching, "tail_bonus_tokens", lambda c, *rest: right[0](others(c), *rest))
    monkeypatch.setattr(
        branching, "early_bonus_tokens", lambda r, forks: right[1](elsewhere(r), forks)
    )
    settings = {"budget": "8", "dtype": "float32", "verify": "coupled", "fan_out": "confidence"}
    llm = ssd(checkpoints["qwen3"], slots=4, **settings)
    spoken = outputs(llm, asked(llm), "ssd")
    assert alone == [other.token_ids for other in spoken]
    rates = [out.metrics["hit_rate"] for out in spoken if out.metrics["hit_rate"] is not None]
    assert np.mean(rates) < 0.1


def test_an_engine_with_ssd_switched_off_has_no_draft(many):
    assert many.loaded.roles("ar", 3).drafter is None


@pytest.mark.more
def test_ssd_can_be_switched_off_and_on_again(many):
    before, plain, after = (outputs(many, asked(many), mode) for mode in ("ssd", "ar", "ssd"))
    for one, other, again in zip(before, plain, after, strict=True):
        assert one.token_ids == other.token_ids == again.token_ids
        assert one.metrics["acceptance_histogram"] == again.metrics["acceptance_histogram"]


@pytest.mark.more
def test_a_smaller_k_uses_the_programs_of_the_largest(many, alone):
    spoken = outputs(many, asked(many), "ssd", 2)
    assert alone == [other.token_ids for other in spoken]
    histograms = [other.metrics["acceptance_histogram"] or [] for other in spoken]
    assert max(map(len, histograms)) == 3
