"""What a text shows and why it ended, in every mode, streamed or not, on scripted roles."""

import dataclasses

import pytest

from ssd_jax.errors import InputError
from tests.engine.letters import EOS, drain, ids, make, outputs, request, speculate
from tests.speculation.watched import ssd

SPECIAL, CUSTOM = 7, 9


def script(text):
    """Writes a text, with `|` for a special token and `#` for an id that may end it; then EOS."""
    tokens = [{"|": SPECIAL, "#": CUSTOM}.get(letter, ord(letter)) for letter in text]
    return lambda prompt, at: tokens[at - len(prompt)] if at - len(prompt) < len(tokens) else EOS


ENGINES = {
    "ar": lambda tokens: make(tokens, context=64)[1],
    "sd": lambda tokens: speculate(tokens, wrong=lambda at: at % 5 == 0, context=64)[2],
    "ssd": lambda tokens: ssd(tokens, context=64).engine,
}


@pytest.fixture(params=ENGINES)
def write(request):
    """Completes a prompt; the streamed pieces are compared with the output."""

    def run(text, **params):
        engine = ENGINES[request.param](script(text))
        asked = engine.add(_asked(**params))
        events = drain(engine)
        (found,) = outputs(events)[asked].outputs
        assert "".join(event.text for event in events) == found.text
        assert [token for event in events for token in event.token_ids] == found.token_ids
        return found

    return run


_asked = request


def test_a_stop_string_is_shown_where_it_is_asked_for(write):
    cut = write("one two three", stop=["wo", "three"])
    shown = write("one two three", stop=["wo", "three"], include_stop_str_in_output=True)
    assert (cut.text, shown.text) == ("one t", "one two")
    assert (cut.token_ids, shown.token_ids) == (ids("one t"), ids("one two"))
    assert cut.stop_reason == shown.stop_reason == "wo"
    assert cut.finish_reason == shown.finish_reason == "stop"
    assert cut.limit is shown.limit is None


def test_special_tokens_are_shown_where_it_is_asked_for(write):
    assert write("a|b").text == "ab"
    shown = write("a|b", skip_special_tokens=False)
    assert (shown.text, shown.token_ids) == ("a<7>b", [97, SPECIAL, 98, EOS])
    ended = write("a|b", skip_special_tokens=False, include_stop_str_in_output=True)
    assert (ended.text, ended.token_ids) == ("a<7>b<1>", shown.token_ids)
    assert write("ab", include_stop_str_in_output=True).text == "ab"  # EOS is a special token


def test_single_special_tokens_are_shown_where_a_request_asks_for_them():
    engine = ENGINES["ar"](script("a|b"))
    engine.add(dataclasses.replace(request(), visible_ids=frozenset({SPECIAL})))
    (output,) = outputs(drain(engine)).values()
    assert output.text == "a<7>b"


def test_a_shown_special_token_can_be_part_of_a_stop_string(write):
    found = write("ab|cd", skip_special_tokens=False, stop="<7>")
    assert (found.text, found.stop_reason) == ("ab", "<7>")
    assert write("ab|cd", stop="<7>").stop_reason is None


def test_the_reason_of_a_stop_is_its_id_unless_it_is_eos(write):
    found = write("ab#cd", stop_token_ids=[CUSTOM])
    assert (found.text, found.token_ids[-1], found.stop_reason) == ("ab", CUSTOM, CUSTOM)
    ended = write("ab")
    assert (ended.finish_reason, ended.token_ids[-1], ended.stop_reason) == ("stop", EOS, None)


@pytest.mark.parametrize(
    ("most", "size", "limit"), [(5, 5, "max_tokens"), (500, 61, "context"), (None, 61, "context")]
)
def test_a_length_says_what_it_has_reached(write, most, size, limit):
    found = write("x" * 99, max_tokens=most)
    assert (len(found.token_ids), found.finish_reason, found.limit) == (size, "length", limit)
    assert found.stop_reason is None


def test_a_seed_that_was_drawn_is_reported(write):
    seeds = {write("ab", seed=None).seed for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert write("ab", seed=5).seed == 5


def test_a_request_for_several_texts_is_refused():
    engine = ENGINES["ar"](script("ab"))
    with pytest.raises(InputError, match="n = 2 is for generate"):
        engine.add(_asked(n=2))
    assert not engine.has_work
