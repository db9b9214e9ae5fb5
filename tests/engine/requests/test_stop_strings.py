"""Streamed text never shows part of a stop string, and tokens are cut where the text is cut."""

import random

import pytest

from ssd_jax.engine.requests.stop_strings import TextStream


class Pieces:
    """Token ids index a list of pieces; a trailing '~' becomes a character on the next push."""

    def __init__(self, pieces):
        self._pieces, self._held = pieces, ""

    def push(self, ids):
        text = self._held + "".join(self._pieces[i] for i in ids)
        self._held = ""
        if text.endswith("~"):
            text, self._held = text[:-1], "é"
        return text

    def flush(self):
        text, self._held = self._held, ""
        return text


def _run(pieces, stops, *, at_once=False, min_tokens=0, include_stop=False):
    stream = TextStream(Pieces(pieces), stops, min_tokens, include_stop=include_stop)
    ids, texts = list(range(len(pieces))), []
    for group in [ids] if at_once else [[i] for i in ids]:
        released = stream.push(group)
        texts.append(released.text)
        if released.stopped:
            return stream, texts, True
    released = stream.finish()
    return stream, [*texts, released.text], released.stopped


@pytest.mark.parametrize("at_once", [False, True])
def test_text_is_cut_before_the_stop_and_later_tokens_are_dropped(at_once):
    stream, _, stopped = _run(["ab", "c", "ST", "OP", "de"], ["STOP"], at_once=at_once)
    assert stopped
    assert (stream.text, stream.token_ids) == ("abc", [0, 1])


def test_a_token_that_reaches_the_cut_is_kept():
    stream, _, _ = _run(["ab", "cST", "OPd"], ["STOP"])
    assert (stream.text, stream.token_ids) == ("abc", [0, 1])


@pytest.mark.parametrize("at_once", [False, True])
def test_an_included_stop_ends_the_text_and_its_tokens_stay(at_once):
    pieces = ["ab", "cST", "OPd", "e"]
    stream, texts, stopped = _run(pieces, ["STOP"], at_once=at_once, include_stop=True)
    assert stopped
    assert (stream.text, stream.token_ids, stream.stop) == ("abcSTOP", [0, 1, 2], "STOP")
    assert at_once or texts == ["ab", "cST", "OP"]  # nothing is held back


def test_the_shorter_of_two_stops_that_begin_together_is_included():
    stream, _, _ = _run(["aSTOPx"], ["STOP", "ST"], include_stop=True)
    assert (stream.text, stream.stop) == ("aST", "ST")


def test_an_included_stop_id_has_its_text():
    stream = TextStream(Pieces(["a", "~", "</s>"]), [], 0, include_stop=True)
    released = stream.push([0, 1, 2], stop_last=True)
    assert (released.text, released.token_ids) == ("aé</s>", [0, 1, 2])


def test_text_that_may_begin_a_stop_is_held_back():
    _, texts, _ = _run(["a", "S", "T", "x", "S", "T", "O", "P"], ["STOP"])
    assert texts == ["a", "", "", "STx", "", "", "", ""]


def test_held_back_text_comes_out_at_the_end():
    stream, texts, stopped = _run(["a", "ST"], ["STOP"])
    assert not stopped
    assert (texts, stream.text, stream.token_ids) == (["a", "", "ST"], "aST", [0, 1])


def test_the_earliest_of_several_stops_wins():
    stream, _, _ = _run(["a1b2c"], ["2", "1"])
    assert stream.text == "a"


def test_a_stop_at_the_very_beginning_leaves_nothing():
    stream, _, stopped = _run(["STOP", "x"], ["STOP"])
    assert stopped
    assert (stream.text, stream.token_ids) == ("", [])


def test_stops_are_not_looked_for_before_min_tokens():
    stream, _, stopped = _run(["a", ".", "b", ".", "c"], ["."], min_tokens=2)
    assert stopped
    assert (stream.text, stream.token_ids) == ("a.b", [0, 1, 2])


@pytest.mark.parametrize(
    ("pieces", "stop"), [(["~", "b"], "é"), (["", "A"], "A")], ids=["a part of one", "no text"]
)
def test_the_first_min_tokens_stay_if_they_have_no_text_before_the_stop(pieces, stop):
    stream, _, stopped = _run(pieces, [stop], min_tokens=1)
    assert stopped
    assert (stream.text, stream.token_ids) == ("", [0])


def test_a_character_over_two_tokens_belongs_to_both():
    stream, _, stopped = _run(["a", "~", "b"], ["b"])
    assert stopped
    assert (stream.text, stream.token_ids) == ("aé", [0, 1, 2])


@pytest.mark.parametrize("at_once", [False, True])
def test_a_stop_that_begins_in_a_character_of_two_tokens_takes_both(at_once):
    stream, _, stopped = _run(["a", "~", "!"], ["é!"], at_once=at_once)
    assert stopped
    assert (stream.text, stream.token_ids) == ("a", [0])


def test_a_hidden_stop_id_is_kept_without_its_text():
    stream = TextStream(Pieces(["a", "</s>"]), [], 0)
    stream.push([0, 1], stop_last=True)
    stream.finish()
    assert (stream.text, stream.token_ids) == ("a", [0, 1])


@pytest.mark.parametrize("include", [False, True])
def test_streamed_pieces_always_add_up_to_the_text_cut_at_the_first_stop(include):
    rng = random.Random(0)
    for _ in range(500):
        pieces = ["".join(rng.choices("ab", k=rng.randint(1, 3))) for _ in range(12)]
        stops = ["".join(rng.choices("ab", k=rng.randint(2, 5))) for _ in range(2)]
        stream, texts, stopped = _run(pieces, stops, include_stop=include)
        again, _, _ = _run(pieces, stops, include_stop=include, at_once=True)
        assert (again.text, again.token_ids) == (stream.text, stream.token_ids)
        text = "".join(pieces)
        # Tokens come one by one, so the first stop is the one that is complete first.
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert stopped == bool(ends)
        assert "".join(texts) == stream.text
        assert text.startswith(stream.text)
        shown = [stop for stop in stops if stop in stream.text]
        assert bool(shown) == (stopped and include)
        assert not shown or stream.text.endswith(stream.stop)
        assert "".join(pieces[i] for i in stream.token_ids).startswith(stream.text)
        if not stopped:
            assert stream.text == text
