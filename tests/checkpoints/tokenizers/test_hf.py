from __future__ import annotations

import pytest
from tokenizers import AddedToken, Regex, pre_tokenizers, processors

from ssd_jax.checkpoints.tokenizers.gguf import tokenizer_from_gguf
from ssd_jax.checkpoints.tokenizers.hf import tokenizer_from_directory
from ssd_jax.checkpoints.tokenizers.tokenizer import first_difference
from ssd_jax.errors import InputError
from tests.checkpoints.builders import TOKENS, backend, directory, metadata, special

N = len(TOKENS)
BOS, EOS = N, N + 1  # <s> and </s> of the default directory
HI = [{"role": "user", "content": "hi"}]


def with_bos():
    tokenizer = backend(special("<s>"), special("</s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def test_eos_ids_come_from_every_file(tmp_path):
    tokenizer = tokenizer_from_directory(
        directory(
            tmp_path,
            tokenizer_config={"eos_token": "</s>"},
            generation_config={"eos_token_id": [3, 5], "bos_token_id": 0},
            config={"eos_token_id": 7},
        )
    )
    assert tokenizer.eos_ids == {3, 5, 7, EOS}


def test_added_tokens_that_a_model_does_not_embed_are_text(tmp_path):
    """As Gemma 3's token for images beside models of text alone, and padding of fine-tuned ones."""
    image = "<image>"
    added = [special("<s>"), special("</s>"), special(image)]
    config = {"eos_token": "</s>", "pad_token": image, "image_token": image}
    path = directory(tmp_path, backend(*added), tokenizer_config=config, chat_template="{{ 1 }}")
    whole = tokenizer_from_directory(path)
    assert (whole.size, whole.encode(image)) == (N + 3, [N + 2])
    assert whole.within(N + 3) is whole
    tokenizer = whole.within(N + 2)
    assert tokenizer.size == N + 2
    assert tokenizer.decode(tokenizer.encode(image)) == image
    assert max(tokenizer.encode(f"{image}hello</s>")) == EOS
    assert (tokenizer.eos_ids, tokenizer.chat_template) == ({EOS}, "{{ 1 }}")
    tokenizer.save(tmp_path / "saved")
    assert first_difference(tokenizer_from_directory(tmp_path / "saved"), tokenizer) is None


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        (N + 1, "{{ 1 }}", r"gives '</s>', which prompts or ends of texts need, the id \d+"),
        (N + 2, "<image>{{ 1 }}", r"gives '<image>', which prompts"),
        (N - 1, "{{ 1 }}", rf"tokenizer has {N + 3} tokens, the model embeds {N - 1}"),
    ],
)
def test_tokens_that_are_needed_and_not_embedded_are_named(tmp_path, rows, template, message):
    added = [special("<s>"), special("</s>"), special("<image>")]
    eos = {"eos_token": "</s>"}
    path = directory(tmp_path, backend(*added), tokenizer_config=eos, chat_template=template)
    with pytest.raises(InputError, match=message):
        tokenizer_from_directory(path).within(rows)


@pytest.mark.parametrize("name", ["generation_config", "config"])
@pytest.mark.parametrize(("value", "ids"), [(4, {4}), ([4, 6], {4, 6}), (None, set())])
def test_eos_may_be_one_id_or_a_list(tmp_path, name, value, ids):
    path = directory(tmp_path, **{name: {"eos_token_id": value}})
    assert tokenizer_from_directory(path).eos_ids == ids


@pytest.mark.parametrize("value", ["2", [1, "2"], 2.5, True])
def test_other_eos_values_are_refused(tmp_path, value):
    with pytest.raises(InputError, match="eos_token_id must be an integer or a list"):
        tokenizer_from_directory(directory(tmp_path, config={"eos_token_id": value}))


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "lstrip": False}])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_named_tokens_may_be_text_or_objects_in_either_file(tmp_path, bos, file):
    tokenizer = tokenizer_from_directory(directory(tmp_path, **{file: {"bos_token": bos}}))
    assert tokenizer.bos_id == BOS


def test_tokenizer_config_wins_over_the_special_tokens_map(tmp_path):
    path = directory(
        tmp_path,
        tokenizer_config={"bos_token": "<s>"},
        special_tokens_map={"bos_token": "</s>", "eos_token": "</s>"},
    )
    tokenizer = tokenizer_from_directory(path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (BOS, {EOS})


def test_the_post_processor_decides_about_bos(tmp_path):
    config = {"bos_token": "<s>", "add_bos_token": False}
    path = directory(tmp_path, with_bos(), tokenizer_config=config)
    assert tokenizer_from_directory(path).encode("a")[0] == BOS


def test_add_bos_token_does_not_replace_a_post_processor(tmp_path):
    tokenizer = backend(special("<s>"))
    tokenizer.post_processor = processors.ByteLevel()
    config = {"bos_token": "<s>", "add_bos_token": True}
    path = directory(tmp_path, tokenizer, tokenizer_config=config)
    assert BOS not in tokenizer_from_directory(path).encode("a")


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "LlamaTokenizer"])
def test_add_bos_token_counts_for_llamas_tokenizers_whose_post_processor_adds_nothing(
    tmp_path, kind
):
    """As DeepSeek-R1-Distill-Qwen has it."""
    tokenizer = backend(special("<s>"))
    tokenizer.post_processor = processors.ByteLevel()
    config = {"bos_token": "<s>", "add_bos_token": True, "tokenizer_class": kind}
    path = directory(tmp_path, tokenizer, tokenizer_config=config)
    found = tokenizer_from_directory(path)
    assert found.encode("a") == [BOS, *found.encode("a", add_special_tokens=False)]


@pytest.mark.parametrize(("add_bos", "begin"), [(True, [BOS]), (False, []), (None, [])])
def test_add_bos_token_decides_where_there_is_no_post_processor(tmp_path, add_bos, begin):
    config = {"bos_token": "<s>", "add_bos_token": add_bos}
    tokenizer = tokenizer_from_directory(directory(tmp_path, tokenizer_config=config))
    assert tokenizer.encode("a") == begin + tokenizer.encode("a", add_special_tokens=False)


def test_a_template_that_writes_bos_gets_no_second_one(tmp_path):
    path = directory(
        tmp_path,
        with_bos(),
        tokenizer_config={"bos_token": "<s>"},
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    tokenizer = tokenizer_from_directory(path)
    assert tokenizer.apply_chat_template(HI, add_generation_prompt=True) == [
        BOS,
        *tokenizer.encode("hi", add_special_tokens=False),
    ]


def test_lengths_of_a_training_run_are_ignored(tmp_path):
    tokenizer = backend()
    tokenizer.enable_truncation(max_length=2)
    tokenizer.enable_padding(length=8)
    loaded = tokenizer_from_directory(directory(tmp_path, tokenizer))
    assert loaded.decode(loaded.encode("a long text"), skip_special_tokens=True) == "a long text"
    assert len(loaded.encode("abc")) == 3


@pytest.mark.parametrize(
    "names",
    [
        {"additional_special_tokens": ["hello"]},
        {"extra_special_tokens": ["hello"]},
        {"extra_special_tokens": {"greeting_token": {"content": "hello"}}},
    ],
)
def test_named_tokens_become_special(tmp_path, names):
    tokenizer = backend(AddedToken("<eot>", special=False))
    config = {"eos_token": "<eot>", **names}
    loaded = tokenizer_from_directory(directory(tmp_path, tokenizer, tokenizer_config=config))
    assert loaded.special_ids == {N, TOKENS.index("hello")}
    assert loaded.decode(loaded.encode("ahello<eot>b"), skip_special_tokens=True) == "ab"


def test_special_tokens_in_a_text_are_split_if_the_configuration_says_so(tmp_path):
    path = directory(tmp_path, backend(special("<s>")))
    assert tokenizer_from_directory(path).encode("<s>") == [N]
    path = directory(
        tmp_path, backend(special("<s>")), tokenizer_config={"split_special_tokens": True}
    )
    assert N not in tokenizer_from_directory(path).encode("a<s>")


def test_a_named_token_outside_the_vocabulary_is_ignored(tmp_path):
    loaded = tokenizer_from_directory(directory(tmp_path, tokenizer_config={"eos_token": "<no>"}))
    assert loaded.eos_ids == set()
    assert loaded.size == N + 2


def test_the_configuration_may_add_tokens(tmp_path):
    added = {
        str(N + 1): {"content": "<tool>", "special": False},
        str(N): {"content": "<end>", "special": True},
    }
    path = directory(tmp_path, backend(), tokenizer_config={"added_tokens_decoder": added})
    loaded = tokenizer_from_directory(path)
    assert loaded.encode("<tool><end>") == [N + 1, N]
    assert loaded.size == N + 2
    assert loaded.special_ids == {N}


def test_an_added_token_with_another_id_is_refused(tmp_path):
    added = {str(N + 5): {"content": "<end>"}}
    path = directory(tmp_path, backend(), tokenizer_config={"added_tokens_decoder": added})
    with pytest.raises(InputError, match=rf"'<end>' the id {N + 5}, tokenizer.json gives it {N}"):
        tokenizer_from_directory(path)


def test_size_leaves_out_the_padding_rows_of_the_model(tmp_path):
    path = directory(tmp_path, config={"vocab_size": N + 64})
    tokenizer = tokenizer_from_directory(path)
    assert tokenizer.size == N + 2
    assert tokenizer.token(tokenizer.size) is None
    assert (
        tokenizer.decode([*tokenizer.encode("hello"), N + 63], skip_special_tokens=True) == "hello"
    )


def test_directory_and_gguf_of_one_vocabulary_agree(tmp_path):
    values = metadata(("<s>", 3), ("</s>", 3), ("[PAD0]", 5), eos_token_id=EOS)
    gguf = tokenizer_from_gguf(values, where="model.gguf")
    hf = tokenizer_from_directory(directory(tmp_path, tokenizer_config={"eos_token": "</s>"}))
    assert first_difference(hf, gguf) is None
    assert hf.eos_ids == gguf.eos_ids
    assert hf.encode("hello world</s>") == gguf.encode("hello world</s>")


def test_the_jinja_file_wins_over_the_configuration(tmp_path):
    config = {"chat_template": "from the configuration"}
    path = directory(tmp_path, tokenizer_config=config)
    assert rendered(path) == "from the configuration"
    directory(path, tokenizer_config=config, chat_template="from the file")
    assert rendered(path) == "from the file"


SEVERAL = {"default": "D", "rag": "R", "tool_use": "{% if tools %}T{% endif %}"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("are_files", [False, True])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "D"),
        ({"tools": TOOLS}, "T"),
        ({"chat_template": "rag"}, "R"),
        ({"chat_template": "default"}, "D"),
        ({"chat_template": "a source"}, "a source"),
    ],
)
def test_of_several_templates_that_of_the_name_or_of_tools_or_the_default_is_taken(
    tmp_path, are_files, arguments, text
):
    entries = [{"name": name, "template": template} for name, template in SEVERAL.items()]
    path = directory(tmp_path, tokenizer_config={"chat_template": entries})
    if are_files:
        others = {"rag": SEVERAL["rag"], "tool_use": SEVERAL["tool_use"]}
        path = directory(
            tmp_path,
            tokenizer_config={"chat_template": "not this one"},
            chat_template=SEVERAL["default"],
            additional_chat_templates=others,
        )
    assert rendered(path, **arguments) == text
    tokenizer_from_directory(path).save(tmp_path / "saved")
    assert rendered(tmp_path / "saved", **arguments) == text


def test_a_template_beside_a_processor_counts_if_there_is_no_other(tmp_path):
    """As in Mistral Small 3.1."""
    path = directory(tmp_path, **{"chat_template": "J"})
    (path / "chat_template.json").write_text('{"chat_template": "of images"}')
    assert tokenizer_from_directory(path).chat_template == "J"
    (path / "chat_template.jinja").unlink()
    assert tokenizer_from_directory(path).chat_template == "of images"
    (path / "tokenizer_config.json").write_text('{"chat_template": "of texts"}')
    assert tokenizer_from_directory(path).chat_template == "of texts"


def test_files_of_templates_take_the_place_of_all_in_the_configuration(tmp_path):
    config = {"chat_template": [{"name": "tool_use", "template": "{{ tools }}"}]}
    path = directory(tmp_path, tokenizer_config=config, chat_template="D")
    assert tokenizer_from_directory(path).chat_template == "D"


def test_without_a_default_the_templates_there_are_are_named(tmp_path):
    path = directory(tmp_path, additional_chat_templates={"tool_use": "{{ tools }}", "rag": "R"})
    assert rendered(path, chat_template="rag") == "R"
    assert "f" in rendered(path, tools=TOOLS)
    with pytest.raises(InputError, match=r"templates rag, tool_use and none named default.*='rag'"):
        rendered(path)


def rendered(path, **arguments):
    tokenizer = tokenizer_from_directory(path)
    ids = tokenizer.apply_chat_template(HI, add_generation_prompt=True, **arguments)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ([], "'name' and 'template'"),
        ([{"name": "../rag", "template": "R"}], "'../rag', which is no plain name"),
        ([{"name": "default"}], "'name' and 'template'"),
        (5, "'name' and 'template'"),
    ],
)
def test_unusable_templates_are_refused(tmp_path, template, message):
    path = directory(tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(InputError, match=message):
        tokenizer_from_directory(path)


def test_without_a_template_messages_are_refused(tmp_path):
    tokenizer = tokenizer_from_directory(directory(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InputError, match=r"no chat template.*`chat_template=False`"):
        tokenizer.apply_chat_template(HI, add_generation_prompt=True)


def test_missing_tokenizer_json_names_the_remedy(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer\.json is missing.*save_pretrained"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize("content", ["{", '{"model": {"type": "Nothing"}}', ""])
def test_a_damaged_tokenizer_json_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer\.json is no tokenizer"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not readable JSON"), (b"\xff", "not UTF-8"), (b"[]", "expected an object")],
)
def test_a_damaged_configuration_is_refused(tmp_path, content, message):
    (directory(tmp_path) / "generation_config.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"generation_config\.json.*{message}"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": 5}, "bos_token must be a string or an object"),
        ({"bos_token": "\ud800"}, "bos_token must be .* of Unicode text"),
        ({"added_tokens_decoder": {"9": {"content": "\udfff"}}}, "of Unicode text"),
        ({"added_tokens_decoder": {"9": {"content": "x", "special": "false"}}}, "true or false"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}, "an object with ids as keys"),
        ({"additional_special_tokens": ["\ud800"]}, "of Unicode text"),
        ({"chat_template": "\ud800"}, "chat_template must be .* of Unicode text"),
    ],
    ids=range(7),
)
def test_impossible_tokens_are_refused(tmp_path, config, message):
    path = directory(tmp_path, tokenizer_config=config)
    with pytest.raises(InputError, match=message):
        tokenizer_from_directory(path)


def test_a_pattern_that_never_ends_is_refused_with_its_file(tmp_path):
    tokenizer = backend(special("<s>"))
    split = pre_tokenizers.Split(Regex(r"(a+)+$"), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    found = tokenizer_from_directory(directory(tmp_path, tokenizer))
    with pytest.raises(InputError, match=f"{tmp_path}: its tokenizer fails on this text"):
        found.encode("a" * 60 + "!")
    assert found.encode("ab")
