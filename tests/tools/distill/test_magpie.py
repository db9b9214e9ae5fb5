"""User turns that the target writes: what they go on from, and which of them are of use."""

import numpy as np
import pytest

from ssd_jax.checkpoints.tokenizers.hf import tokenizer_from_directory
from ssd_jax.errors import InputError
from ssd_jax.testing import tiny
from ssd_jax.tools.distill.magpie import read_turns, user_turn
from ssd_jax.tools.distill.shards import Sample

PROMPT = [tiny.END_OF_TURN, 1, 2]


def tokenizer_of(directory, template=tiny.TEMPLATE):
    directory.mkdir()
    tiny.write_tokenizer(directory, template=template)
    return tokenizer_from_directory(directory)


@pytest.fixture
def tokenizer(tmp_path):
    return tokenizer_of(tmp_path / "tokenizer")


def test_a_turn_goes_on_from_the_empty_user_prefix(tokenizer):
    before, end = user_turn(tokenizer)
    assert tokenizer.decode(before, skip_special_tokens=False) == "<eot>user:"
    assert end == tiny.END_OF_TURN


def test_a_system_message_of_the_template_is_part_of_the_prefix(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "t", "<eot>system:Be kind." + tiny.TEMPLATE)
    assert (
        tokenizer.decode(user_turn(tokenizer).prefix, skip_special_tokens=True)
        == "system:Be kind.user:"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the target has none"),
        ("{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}", "turn with '\\['"),
        ("user:{% for m in messages %}{{ m.content }}{% endfor %}", "turn with ''"),
        ("{% for m in messages %}{{ m.content }}<eot>{% endfor %}", "it puts nothing there"),
    ],
)
def test_a_target_whose_user_turns_have_no_such_ends_is_refused(tmp_path, template, message):
    with pytest.raises(InputError, match=message):
        user_turn(tokenizer_of(tmp_path / "t", template))


def fates(tokenizer, *texts):
    """Of turns that end as they should."""
    ids = [[*tokenizer.encode(text), tiny.END_OF_TURN] for text in texts]
    return [turn.exclusion for turn in read_turns(samples(*ids), tokenizer)]


def samples(*turns):
    return [
        Sample(tokens=np.array([*PROMPT, *ids], np.int32), prompt_length=len(PROMPT))
        for ids in turns
    ]


def test_turns_are_what_follows_the_prefix_up_to_its_end(tokenizer):
    ids = [*tokenizer.encode(" Who built the old bridge?\n"), tiny.END_OF_TURN]
    assert read_turns(samples(ids), tokenizer) == [("Who built the old bridge?", "")]


def test_a_turn_that_was_cut_off_or_is_no_text_is_left_out(tokenizer):
    words = tokenizer.encode("Who built the old bridge?")
    turns = samples(
        words,
        [*words, tiny.EOS],  # of a text, not of a turn
        [*words, tiny.PAD, *words, tiny.END_OF_TURN],
        [*words, tokenizer.encode("é")[0], tiny.END_OF_TURN],  # half a character
        [*words, tiny.END_OF_TURN],
    )
    assert [turn.exclusion for turn in read_turns(turns, tokenizer)] == ["broken"] * 4 + [""]


def test_a_turn_of_hardly_any_words_is_left_out(tokenizer):
    assert fates(tokenizer, "", "Why? Who!", "Why so blue?") == ["too_short", "too_short", ""]


def test_of_turns_that_are_much_alike_the_first_counts(tokenizer):
    assert fates(
        tokenizer,
        "Can you give me a list of the best books about birds?",
        "can you give me: a LIST of the best books about birds",
        "Please, can you give me a list of the best books about birds?",  # 9 of 10 are known
        "Can you give me a list of the best films about trains?",  # 6 of 9
        "Can you tell me which birds live in the garden?",
    ) == ["", "repeated", "repeated", "", ""]


def test_what_was_left_out_makes_no_other_a_repetition(tokenizer):
    words = tokenizer.encode("Who built the old bridge of stone?")
    turns = read_turns(samples(words, [*words, tiny.END_OF_TURN]), tokenizer)
    assert [turn.exclusion for turn in turns] == ["broken", ""]
