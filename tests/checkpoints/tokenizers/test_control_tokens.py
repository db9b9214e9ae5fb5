"""Control tokens that messages spell stay text, and those of the template stay tokens."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ssd_jax.checkpoints.tokenizers.control_tokens import CALL_MARKS
from ssd_jax.checkpoints.tokenizers.gguf import tokenizer_from_gguf
from ssd_jax.checkpoints.tokenizers.hf import tokenizer_from_directory
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer as OurTokenizer
from ssd_jax.errors import InputError
from tests.checkpoints.builders import backend, directory, metadata, special
from tests.checkpoints.tokenizers.conftest import golden

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
SPACED = TEMPLATE.replace("<s>", "<s> ").replace("</s>", " </s>")
SPELLED = ("<s>", "</s>", "<tool>")


def from_gguf() -> OurTokenizer:
    values = metadata(("<s>", 3), ("</s>", 3), ("<tool>", 4), bos_token_id=None)
    return tokenizer_from_gguf(
        values | {"tokenizer.chat_template": TEMPLATE, "tokenizer.ggml.eos_token_id": 262},
        where="tiny",
    )


def from_sentencepiece() -> OurTokenizer:
    values = {**golden("sentencepiece.json")["metadata"], "tokenizer.chat_template": TEMPLATE}
    return tokenizer_from_gguf(values, where="golden")


def from_hf(tmp_path) -> OurTokenizer:
    """Special tokens that take in white space, and words that begin with the text alone."""
    made = backend(
        AddedToken("<s>", special=True, normalized=False, rstrip=True),
        AddedToken("</s>", special=True, normalized=False, lstrip=True),
        AddedToken("<tool>", special=False, normalized=False),
    )
    return tokenizer_from_directory(directory(tmp_path, made, chat_template=SPACED))


def with_metaspace() -> OurTokenizer:
    """A space before the first word of a text, but not before those that follow a token."""
    letters = [*"abcdefghijklmnopqrstuvwxyz<>/|_\n. ", "▁"]
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, [], byte_fallback=True))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.add_tokens([special("<s>"), special("</s>")])
    return OurTokenizer(made, eos_ids=[], chat_template=TEMPLATE, where="metaspace")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> list[OurTokenizer]:
    directory = tmp_path_factory.mktemp("hf")
    return [from_gguf(), from_sentencepiece(), from_hf(directory), with_metaspace()]


words = st.lists(st.sampled_from([*SPELLED, "hello", "he", " w", "<", "s>", " ", "\n", "x"]))
texts = words.map("".join)


def special_tokens(tokenizer: OurTokenizer, ids: list[int]) -> list[str | None]:
    return [tokenizer.token(i) for i in ids if i in tokenizer.special_ids]


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(contents=st.lists(texts, min_size=1, max_size=3))
def test_only_control_tokens_of_the_template_are_tokens(tokenizers, contents):
    messages = [{"role": "user", "content": content} for content in contents]
    for tokenizer in tokenizers:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, split_special_tokens=True
        )
        found = [token for token in special_tokens(tokenizer, ids) if token != "<unk>"]
        assert found == ["<s>", "</s>"] * len(contents) + ["<s>"]


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(contents=st.lists(texts, min_size=1, max_size=3))
def test_texts_without_spelled_tokens_have_the_ids_that_they_have_otherwise(tokenizers, contents):
    messages = [{"role": "user", "content": re.sub("</?s>", "", content)} for content in contents]
    messages = [m for m in messages if not re.search("</?s>", m["content"])] or messages[:0]
    if messages:
        for tokenizer in tokenizers:
            split = tokenizer.apply_chat_template(messages, split_special_tokens=True)
            assert split == tokenizer.apply_chat_template(messages)


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(content=texts)
def test_the_text_comes_back_with_its_spellings(tokenizers, content):
    tokenizer = tokenizers[0]
    messages = [{"role": "user", "content": content}]
    ids = tokenizer.apply_chat_template(messages, split_special_tokens=True)
    assert tokenizer.decode(ids) == f"<s>user {content}</s>\n"
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"user {content}\n"
    plain = tokenizer.encode(content, split_special_tokens=True)
    assert tokenizer.decode(plain, skip_special_tokens=True) == content
    assert special_tokens(tokenizer, plain) == []


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(content=texts)
def test_a_spelled_token_has_the_ids_of_its_characters_and_changes_none_around_it(
    tokenizers, content
):
    """Byte-level words are cut at punctuation, so the words around a spelling stay the same."""
    tokenizer = tokenizers[0]
    header = tokenizer.encode("<s>user ")
    end = tokenizer.encode("</s>\n")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"x{content}x"}], split_special_tokens=True
    )
    inner = tokenizer.encode(f"user x{content}x", split_special_tokens=True)
    assert ids == [header[0], *inner, *end]


def test_tool_calls_and_tools_are_text_too(tokenizers):
    source = "{{ tools | tojson }}<s>{{ messages | tojson }}</s>"
    call = {"function": {"name": "<s>", "arguments": {"</s>": ["</s>", 1]}}}
    ids = tokenizers[0].apply_chat_template(
        [{"role": "assistant", "content": None, "tool_calls": [call]}],
        [{"name": "a</s>"}],
        chat_template=source,
        split_special_tokens=True,
    )
    assert special_tokens(tokenizers[0], ids) == ["<s>", "</s>"]
    assert tokenizers[0].decode(ids).count("</s>") == 4


def test_marks_of_tool_calls_are_control_tokens_though_they_are_not_special():
    source = (
        "{% for m in messages %}<s>{{ m.content }}{% for c in m.tool_calls %}"
        "<tool_call>{{ c.function.name }}</tool_call>{% endfor %}</s>{% endfor %}"
    )
    marks = [AddedToken(mark, special=False, normalized=False) for mark in CALL_MARKS]
    made = backend(special("<s>"), special("</s>"), *marks)
    tokenizer = OurTokenizer(made, eos_ids=[], chat_template=source, where="tiny")
    spelled = "<tool_call>x</tool_call>"
    call = {"function": {"name": spelled, "arguments": {}}}
    messages = [{"role": "user", "content": spelled}, {"role": "assistant", "tool_calls": [call]}]
    ids = tokenizer.apply_chat_template(messages, split_special_tokens=True)
    assert [t for t in map(tokenizer.token, ids) if t in CALL_MARKS] == [*CALL_MARKS]
    assert tokenizer.decode(ids) == f"<s>{spelled}</s><s><tool_call>{spelled}</tool_call></s>"
    plain = tokenizer.encode(spelled, split_special_tokens=True)
    marks = {tokenizer.added_tokens[mark] for mark in CALL_MARKS}
    assert marks.isdisjoint(plain)
    assert marks < {*tokenizer.encode(spelled)}


def test_a_key_alone_is_text_too(tokenizers):
    message = {"role": "tool", "content": "x", "about": {"</s>": 1}}
    ids = tokenizers[0].apply_chat_template(
        [message], chat_template="{{ messages[0].about | tojson }}", split_special_tokens=True
    )
    assert special_tokens(tokenizers[0], ids) == []


def test_no_pair_of_a_sentencepiece_vocabulary_forms_a_control_token():
    tokens = ["<unk>", "<s>", "</s>", "<", "s", ">", "<s", "x", "▁"]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 6,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = tokenizer_from_gguf(values, where="tiny")
    ids = tokenizer.encode("x<s>", split_special_tokens=True)
    assert [tokens[i] for i in ids] == ["x", "<s", ">"]
    assert tokenizer.encode("x<s>") == [7, 1]


def test_a_tokenizer_that_splits_its_tokens_anyway_goes_on_to_do_so(tmp_path):
    config = {"split_special_tokens": True}
    made = directory(tmp_path, chat_template=TEMPLATE, tokenizer_config=config)
    tokenizer = tokenizer_from_directory(made)
    messages = [{"role": "user", "content": "a<s>"}]
    ids = tokenizer.apply_chat_template(messages, split_special_tokens=True)
    assert ids == tokenizer.apply_chat_template(messages)
    assert special_tokens(tokenizer, ids) == []


def test_overlapping_and_private_characters_are_no_way_around(tokenizers):
    tokenizer = tokenizers[0]
    for content in ("<s<s>>", "<<s></s>", "\ue000<s>\ue001", "\ue000-262\ue001</s>"):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], split_special_tokens=True
        )
        assert special_tokens(tokenizer, ids) == ["<s>", "</s>"]
        assert tokenizer.decode(ids) == f"<s>user {content}</s>\n"


def test_a_template_that_looks_for_a_spelled_token_is_refused(tokenizers):
    source = "<s>{{ messages[0].content.split('</s>')[-1] }}"
    with pytest.raises(InputError, match="something else where a message spells a control token"):
        tokenizers[0].apply_chat_template(
            [{"role": "user", "content": "a</s>b"}],
            chat_template=source,
            split_special_tokens=True,
        )


def test_a_tokenizer_without_a_plain_form_is_refused():
    made = Tokenizer(models.Unigram([("<unk>", -9.0), ("</s>", 0.0), ("a", -1.0)], 0, False))
    made.add_special_tokens(["</s>"])
    tokenizer = OurTokenizer(made, eos_ids=[1], where="tiny")
    assert tokenizer.encode("a", split_special_tokens=True) == [2]
    with pytest.raises(InputError, match="no plain form of '</s>'"):
        tokenizer.encode("a</s>", split_special_tokens=True)


def test_a_continued_message_keeps_its_spellings(tokenizers):
    ids = tokenizers[0].apply_chat_template(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a</s>b"}],
        continue_final_message=True,
        split_special_tokens=True,
    )
    assert tokenizers[0].decode(ids) == "<s>user x</s>\n<s>assistant a</s>b"
    assert special_tokens(tokenizers[0], ids) == ["<s>", "</s>", "<s>"]


def test_smollm2_keeps_its_template_around_a_spelled_end_of_turn(smollm2):
    def ids(content, **about):
        return smollm2.apply_chat_template([{"role": "user", "content": content}], **about)

    plain = ids("say <|im_end|> twice", split_special_tokens=True)
    text = ids("say <|im_end|> twice", tokenize=False)
    assert smollm2.decode(plain) == text
    assert len(special_tokens(smollm2, plain)) == len(special_tokens(smollm2, ids("x")))
    assert ids("x", split_special_tokens=True) == ids("x")
