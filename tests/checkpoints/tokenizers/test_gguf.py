from __future__ import annotations

import pytest

from ssd_jax.checkpoints.tokenizers.gguf import tokenizer_from_gguf
from ssd_jax.checkpoints.tokenizers.pre_tokenizers import PRE_TOKENIZERS, SAME_AS, pre_tokenizer
from ssd_jax.errors import InputError
from tests.checkpoints.builders import TOKENS, metadata
from tests.checkpoints.tokenizers.conftest import golden

N = len(TOKENS)
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5


def load(values):
    return tokenizer_from_gguf(values, where="model.gguf")


def tokens(tokenizer, text, **options):
    return [tokenizer.token(i) for i in tokenizer.encode(text, **options)]


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    tokenizer = load(metadata(("<end>", CONTROL), ("<tool>", USER_DEFINED)))
    ids = tokenizer.encode("hello<tool><end>")
    assert [tokenizer.token(i) for i in ids] == ["hello", "<tool>", "<end>"]
    assert tokenizer.special_ids == {N}
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello<tool><end>"


def test_of_several_templates_that_of_tools_is_taken_for_tools():
    values = metadata() | {
        "tokenizer.chat_template": "D",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ tools[0].name }}",
    }
    tokenizer = load(values)
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "D"
    assert tokenizer.apply_chat_template(messages, [{"name": "f"}], tokenize=False) == "f"
    del values["tokenizer.chat_template.tool_use"]
    with pytest.raises(InputError, match=r"names 'tool_use', and .*\.tool_use is None"):
        load(values)


def test_unknown_tokens_are_special():
    tokenizer = load(metadata(("<unk>", UNKNOWN)))
    assert tokenizer.special_ids == {N}
    assert tokenizer.decode([*tokenizer.encode("hello"), N], skip_special_tokens=True) == "hello"


def test_trailing_unused_tokens_are_padding():
    padding = ("[PAD1]", UNUSED), ("[PAD2]", UNUSED)
    tokenizer = load(metadata(("<end>", CONTROL), *padding, padding_token_id=N + 2))
    assert tokenizer.size == N + 1
    assert tokenizer.token(N + 1) is None
    assert (
        tokenizer.decode([*tokenizer.encode("hello"), N + 1], skip_special_tokens=True) == "hello"
    )


def test_trailing_tokens_that_are_named_after_their_ids_are_padding():
    padding = [(f"[PAD{N + i}]", USER_DEFINED) for i in (1, 2)]
    tokenizer = load(metadata(("[PAD7]", USER_DEFINED), *padding))
    assert tokenizer.size == N + 1
    assert N + 1 not in tokenizer.encode(padding[0][0])


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_all_kinds_of_end_are_eos(kind):
    named = {"eos_token_id": N, "eot_token_id": N + 1, "eom_token_id": N + 2}
    by_text = [
        "<|endoftext|>",
        "<|im_end|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "</s>",
    ]
    added = [(text, kind) for text in ("<a>", "<b>", "<c>", *by_text, "<|im_start|>")]
    tokenizer = load(metadata(*added, **named))
    assert tokenizer.eos_ids == {*range(N, N + 3 + len(by_text))}
    assert tokenizer.decode(tokenizer.encode("hello<|end|>"), skip_special_tokens=True) == "hello"


@pytest.mark.parametrize("ends", [("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>")])
def test_the_end_of_a_message_ends_no_text_that_has_several(ends):
    """gpt-oss thinks in one message and answers in the next."""
    tokens = [(token, CONTROL) for token in ("<|end|>", *ends)]
    assert load(metadata(*tokens, eos_token_id=N + 1)).eos_ids == {N + 1, N + 2}
    assert load(metadata(*tokens[:2], eos_token_id=N + 1)).eos_ids == {N, N + 1}


def test_an_end_marker_that_is_ordinary_text_is_no_eos():
    tokenizer = load(metadata(("</s>", 1), ("<e>", CONTROL), eos_token_id=N + 1))
    assert tokenizer.eos_ids == {N + 1}
    assert tokens(tokenizer, "</s>") == ["<", "/", "s", ">"]


@pytest.mark.parametrize(
    ("pre", "add_bos", "begins_with_bos"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama3", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_bos_is_added_where_the_file_or_its_kind_says_so(pre, add_bos, begins_with_bos):
    values = metadata(("<bos>", CONTROL), pre=pre, add_bos_token=add_bos, bos_token_id=N)
    tokenizer = load(values)
    assert tokens(tokenizer, "hello") == ["<bos>"] * begins_with_bos + ["hello"]
    assert tokens(tokenizer, "hello", add_special_tokens=False) == ["hello"]
    assert tokenizer.bos_id == N


def test_llama_3_finds_words_that_no_merge_makes():
    def pieces(pre):
        return tokens(load(metadata(("xyz", 1), pre=pre, add_bos_token=False)), "xyz")

    assert pieces("llama-bpe") == ["xyz"]
    assert pieces("gpt-2") == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["1234"]),
        ("default", ["123", "4"]),
    ],
)
def test_digits_are_grouped_as_the_pre_tokenizer_says(pre, pieces):
    numbers = metadata(("12", 1), ("123", 1), ("1234", 1), pre=pre, merges=["1 2", "12 3", "123 4"])
    assert tokens(load(numbers), "1234") == pieces


def test_qwen2_composes_characters():
    tokenizer = load(metadata(pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301"), skip_special_tokens=True) == "\u00e9"


def test_sentencepiece_files_have_the_defaults_of_llama_cpp():
    tokenizer = load(golden("sentencepiece.json")["metadata"])
    ids = tokenizer.encode("the line")
    assert tokenizer.token(ids[0]) == "<s>"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (1, {2}, {0, 1, 2})
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the line"


def test_sentencepiece_without_byte_tokens_has_one_unknown_for_a_strange_word():
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "\u2581", "a"],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, 1, 1],
        "tokenizer.ggml.scores": [0.0] * 5,
    }
    assert load(values).encode("a世界a") == [1, 3, 4, 0, 4]


def test_an_added_token_is_plain_text_though_its_letters_stand_for_bytes():
    tokenizer = load(metadata(("<é>", USER_DEFINED)))
    assert tokenizer.decode(tokenizer.encode("é<é>"), skip_special_tokens=True) == "é<é>"


def test_a_file_without_token_types_still_has_special_tokens():
    values = metadata(("<e>", CONTROL), token_type=None, eos_token_id=N)
    assert load(values).special_ids == {N}


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv"])
def test_other_models_are_refused(model):
    with pytest.raises(InputError, match=f"model.gguf.*'{model}'.*'gpt2'.*'llama'"):
        load(metadata(model=model))


def test_other_pre_tokenizers_are_refused():
    with pytest.raises(InputError, match=f"'viking'.*{', '.join(PRE_TOKENIZERS)}"):
        load(metadata(pre="viking"))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("tekken", ["An", " i", "Phone", "Case", "'S", " ", "1", "2", "3", "4", "!/\n"]),
        ("gpt-4o", ["An", " i", "Phone", "Case'S", " ", "123", "4", "!/\n"]),
        ("seed-coder", ["An", " iPhoneCase", "'S", " ", "1", "2", "3", "4", "!/", "\n"]),
        ("glm4", ["An", " iPhoneCase", "'S", " ", "123", "4", "!/\n"]),
        ("refact", ["An", " iPhoneCase", "'", "S", " ", "1", "2", "3", "4", "!/", "\n"]),
        ("command-r", ["An", " iPhoneCase", "'", "S", " ", "1", "2", "3", "4", "!/", "\n"]),
        ("olmo", ["An", " iPhoneCase", "'", "S", " 1234", "!/", "\n"]),
        ("exaone4", ["An", " iPhoneCase", "'", "S", " 1234", "!/", "\n"]),
        ("chatglm-bpe", ["An", " iPhoneCase", "'S", " ", "123", "4", "!/\n"]),
        ("hunyuan", ["An", " iPhoneCase", "'S", " ", "1", "2", "3", "4", "!/\n"]),
        ("jais-2", ["An", " iPhoneCase", "'S", " ", "123", "4", "!/\n"]),
        ("exaone-moe", ["An iPhoneCase", "'S", " ", "1", "2", "3", "4", "!/\n"]),
        ("deepseek-coder", ["An", " iPhoneCase", "'", "S", " ", "1", "2", "3", "4", "!/", "\n"]),
        ("hunyuan-dense", ["An", " iPhoneCase", "'S", " ", "123", "4", "!/\n"]),
    ],
)
def test_words_are_cut_as_the_models_own_pre_tokenizers_cut_them(pre, pieces):
    words = pre_tokenizer(SAME_AS.get(pre, pre)).pre_tokenize_str("An iPhoneCase'S 1234!/\n")
    assert [word.replace("\u0120", " ").replace("\u010a", "\n") for word, _ in words] == pieces


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_missing_metadata_is_named(key):
    with pytest.raises(InputError, match=rf"no tokenizer\.ggml\.{key}.*convert"):
        load(metadata(**{key: None}))


def test_missing_scores_are_named():
    values = {
        k: v for k, v in golden("sentencepiece.json")["metadata"].items() if "scores" not in k
    }
    with pytest.raises(InputError, match=r"no tokenizer\.ggml\.scores"):
        load(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [*TOKENS[:-1], "a"]}, "'a' stands twice"),
        ({"token_type": [1]}, f"1 entries.*for {N} tokens"),
        ({"merges": ["no where"]}, "merges does not fit"),
        ({"eos_token_id": N}, f"eos_token_id is {N}, but the vocabulary has {N} tokens"),
    ],
)
def test_damaged_metadata_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        load(metadata(**changes))


def test_too_few_scores_are_refused():
    values = golden("sentencepiece.json")["metadata"] | {"tokenizer.ggml.scores": [0.0]}
    with pytest.raises(InputError, match=r"1 entries in tokenizer\.ggml\.scores"):
        load(values)
