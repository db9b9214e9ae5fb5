"""Where committed tokens end, also when several come at once."""

from fractions import Fraction

import numpy as np
import pytest

from ssd_jax.engine.request import Request
from ssd_jax.engine.requests.sequence import Sequence
from ssd_jax.errors import InputError
from ssd_jax.options.other_names import Unsupported
from ssd_jax.sampling.other_names import OTHER_NAMES
from ssd_jax.sampling.params import SamplingParams

EOS = 1


def sequence(context=100, **params):
    request = Request(prompt_ids=[7, 8, 9], params=SamplingParams(**params))
    return Sequence(request, eos_ids=frozenset({EOS}), context=context)


def test_tokens_after_a_stop_in_the_same_block_are_dropped():
    s = sequence()
    assert s.commit([5, EOS, 6, 7]) == [5, EOS]
    assert (s.output, s.finish_reason) == ([5, EOS], "stop")
    assert s.commit([8]) == []


def test_the_stop_is_checked_before_the_length():
    s = sequence(max_tokens=2)
    s.commit([5, EOS, 6])
    assert s.finish_reason == "stop"


def test_the_length_cuts_a_block():
    s = sequence(max_tokens=2)
    assert s.commit([5, 6, EOS]) == [5, 6]
    assert s.finish_reason == "length"


def test_the_context_counts_prompt_and_output():
    s = sequence(context=5)
    assert s.commit([5, 6, 7]) == [5, 6]
    assert s.finish_reason == "length"


def test_a_stop_id_does_not_end_before_min_tokens():
    s = sequence(min_tokens=2)
    assert s.commit([EOS, EOS, EOS, 5]) == [EOS, EOS, EOS]
    assert s.finish_reason == "stop"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"temperature": -0.1},
            r"temperature = -0.1 is out of range; give 0 \(greedy\) or a value",
        ),
        ({"temperature": 1e-30}, "temperature = 1e-30"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"temperature": "hot"}, "temperature = 'hot' is not understood; give a number"),
        ({"top_p": 0.0}, "top_p = 0.0 .* from 1e-06 to 1.0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"min_p": 2}, "min_p = 2"),
        ({"top_k": -2}, "top_k = -2"),
        ({"top_k": 2.5}, "top_k = 2.5 is not understood; give an integer"),
        ({"ignore_eos": 1}, "ignore_eos = 1 is not understood; give true or false"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens = 5"),
        ({"stop": [""]}, "not empty"),
        ({"stop": [3]}, "each stop is a string"),
        ({"stop": "\ud800"}, "a string of Unicode text"),
        ({"stop": 5}, "each stop is a string"),
        ({"stop": np.array(5)}, "each stop is a string"),
        ({"stop": 0}, "each stop is a string"),
        ({"stop_token_ids": ["a"]}, "token ids are integers"),
        ({"stop_token_ids": [True]}, "token ids are integers"),
        ({"logit_bias": {True: 1.0}}, "is not understood"),
        ({"logit_bias": {3: float("inf")}}, r"must be from -1e\+06 to 1e\+06"),
        ({"logit_bias": {3: float("nan")}}, "must be from"),
        ({"logit_bias": {3: -1e39}}, "must be from"),  # finite in Python alone
        ({"logit_bias": {3.7: 1.0}}, "is not understood"),
        ({"logit_bias": [(3, 1.0), (3, 2.0)]}, "names an id twice"),
        ({"logit_bias": dict.fromkeys(range(65), 1.0)}, "at most 64"),
        ({"temperature": 10**400}, "temperature is larger than any float"),
        ({"logit_bias": {1: 10**400}}, "logit_bias = .* is not understood"),
        ({"temprature": 1}, "unknown key 'temprature'; did you mean 'temperature'?"),
        ({"n": 0}, "n = 0 is out of range"),
        ({"n": True}, "n = True is not understood"),
        ({"skip_special_tokens": 0}, "skip_special_tokens = 0 is not understood"),
        ({"best_of": 3}, "best_of = 3 means nothing here: give n"),
        ({"best_of": True}, "best_of = True means nothing here"),
        ({"use_beam_search": True}, "use_beam_search = True means nothing here: there is no beam"),
        ({"detokenize": False}, "detokenize = False means nothing here: texts are always made"),
        ({"truncate_prompt_tokens": 5}, r"= 5 means nothing here: .* llm.encode\(prompt\)"),
        ({"guided_decoding": {"json": {}}}, "guided_decoding = {'json': {}} means nothing here"),
        ({"logits_processors": [print]}, "logits_processors = .* means nothing here: logit_bias"),
    ],
)
def test_settings_out_of_range_are_named_with_the_range(params, message):
    with pytest.raises(InputError, match=message):
        SamplingParams(**params)


def test_logit_bias_may_be_text():
    assert SamplingParams(logit_bias="42:-5.5") == SamplingParams(logit_bias={42: -5.5})


def test_none_means_no_stops_and_no_bias():
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


def test_settings_are_plain_numbers_as_a_draft_elsewhere_gets_them():
    params = SamplingParams(
        temperature=Fraction(1, 2), top_p=np.float32(0.5), top_k=np.int64(3), logprobs=np.int8(1)
    )
    found = params.temperature, params.top_p, params.top_k, params.logprobs, params.min_p
    assert [type(value) for value in found] == [float, float, int, int, float]
    assert found == (0.5, 0.5, 3, 1, 0.0)


def test_settings_of_vllm_whose_values_ask_for_nothing_are_taken():
    names = {name: known for name, known in OTHER_NAMES.items() if isinstance(known, Unsupported)}
    for place in (0, -1):
        idle = {name: known.accepted[place] for name, known in names.items()}
        assert SamplingParams(temperature=0.5, **idle) == SamplingParams(temperature=0.5)


def test_top_k_is_off_at_0_and_as_vllm_writes_it():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=np.int64(-1)) == SamplingParams(top_k=0)


@pytest.mark.parametrize(
    ("most", "limit"), [(4, "max_tokens"), (5, "max_tokens"), (6, "context"), (None, "context")]
)
def test_the_length_ends_at_max_tokens_or_the_context(most, limit):
    s = sequence(context=8, max_tokens=most)  # 3 of the 8 tokens are the prompt's
    s.commit([5] * 9)
    assert (len(s.output), s.finish_reason, s.limit) == (min(most or 5, 5), "length", limit)


def test_a_seed_of_none_is_drawn_for_each_request_and_its_texts_share_it():
    fresh = SamplingParams(seed=None, n=3)
    one, other = (Request(prompt_ids=[7], params=fresh, index=1) for _ in range(2))
    assert one.params.seed != other.params.seed
    assert fresh.seed is None
    texts = one.split(4)
    assert [(text.index, text.params.n) for text in texts] == [(1, 1), (5, 1), (9, 1)]
    assert {text.params.seed for text in texts} == {one.params.seed}
