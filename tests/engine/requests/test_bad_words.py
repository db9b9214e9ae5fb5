"""Bad words as token ids."""

import pytest

from ssd_jax.engine.requests.bad_words import encoded
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import MAX_BAD_WORDS

IDS = {
    "no": [1],
    " no": [2],
    "maybe": [3, 4],
    " maybe": [5],
    "ja": [6, 7],
    " ja": [8, 6, 7],
    "": [],
    " ": [9],
}


def test_each_form_of_a_bad_word_is_banned_once():
    assert encoded(["no", "maybe", "ja", "  no"], IDS.__getitem__) == (
        (1,),
        (2,),
        (3, 4),
        (5,),
        (6, 7),
    )


def test_requests_without_bad_words_need_no_tokenizer():
    assert encoded((), lambda _: pytest.fail("asked")) == ()


@pytest.mark.parametrize("word", ["", " ", "\n"])
def test_a_word_without_tokens_is_refused_with_what_bans_it(word):
    with pytest.raises(InputError, match="logit_bias"):
        encoded([word], lambda text: IDS[text])


def test_more_sequences_than_programs_have_room_for_are_refused():
    def encode(text):
        return [2 * int(text) + (text[0] == " ")]

    assert len(encoded(map(str, range(MAX_BAD_WORDS // 2)), encode)) == MAX_BAD_WORDS
    with pytest.raises(InputError, match=f"{MAX_BAD_WORDS + 2} token sequences"):
        encoded(map(str, range(MAX_BAD_WORDS // 2 + 1)), encode)
