from __future__ import annotations

import subprocess
import sys

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from ssd_jax.checkpoints.tokenizers.gguf import tokenizer_from_gguf
from ssd_jax.checkpoints.tokenizers.hf import tokenizer_from_directory
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer, first_difference
from ssd_jax.errors import InputError
from tests.checkpoints.builders import TOKENS, metadata
from tests.checkpoints.tokenizers.conftest import golden

N = len(TOKENS)


def assert_equal(a, b, texts):
    assert first_difference(a, b) is None
    for attribute in ("size", "eos_ids", "bos_id", "special_ids", "has_chat_template"):
        assert getattr(a, attribute) == getattr(b, attribute)
    for text in texts:
        for add_special in (True, False):
            ids = a.encode(text, add_special_tokens=add_special)
            assert b.encode(text, add_special_tokens=add_special) == ids
        assert b.decode(ids, skip_special_tokens=True) == a.decode(ids, skip_special_tokens=True)


def test_a_saved_smollm2_is_equal(smollm2, texts, tmp_path):
    smollm2.save(tmp_path / "new" / "directory")
    loaded = tokenizer_from_directory(tmp_path / "new" / "directory")
    assert_equal(smollm2, loaded, texts)
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.apply_chat_template(
        messages, add_generation_prompt=True
    ) == smollm2.apply_chat_template(messages, add_generation_prompt=True)


def test_a_saved_sentencepiece_tokenizer_is_equal(small_sentencepiece, texts, tmp_path):
    small_sentencepiece.save(tmp_path)
    assert_equal(small_sentencepiece, tokenizer_from_directory(tmp_path), texts)


def test_a_saved_tokenizer_keeps_its_template_and_its_special_tokens(tmp_path):
    added = [(text, 3) for text in ("<bos>", "<é>", "<eot>", "<eom>")]
    ids = {"bos_token_id": N, "eos_token_id": N + 1, "eot_token_id": N + 2, "eom_token_id": N + 3}
    values = metadata(*added, **ids)
    values["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer = tokenizer_from_gguf(values, where="tiny")
    tokenizer.save(tmp_path)
    loaded = tokenizer_from_directory(tmp_path)
    ids = loaded.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True
    )
    assert [loaded.token(i) for i in ids] == ["<bos>", "hello", "<é>"]
    assert loaded.eos_ids == {N + 1, N + 2, N + 3}


def test_lone_surrogates_are_refused():
    tokenizer = tokenizer_from_gguf(metadata(), where="tiny")
    with pytest.raises(InputError, match=r"lone surrogate '\\udcff'; pass"):
        tokenizer.encode("ab\udcff")


@pytest.mark.parametrize("token_id", [-1, 10_000])
def test_ids_outside_the_vocabulary_have_no_token(token_id):
    assert tokenizer_from_gguf(metadata(), where="tiny").token(token_id) is None


def test_size_is_beyond_the_last_id_though_ids_have_gaps():
    backend = Backend(models.BPE({"a": 0, "b": 7}, []))
    backend.add_tokens(["<x>"])
    tokenizer = Tokenizer(backend, eos_ids=[7, 8, 300], where="tiny")
    assert tokenizer.size == 8
    assert tokenizer.eos_ids == {7}  # others are never drawn
    assert tokenizer.token(7) == "b"


def test_start_up_imports_neither_jinja_nor_transformers():
    code = (
        "import sys; from ssd_jax.checkpoints.tokenizers import detokenizer, gguf, hf;"
        "print({'jinja2', 'transformers', 'gguf'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout == "set()\n"


def test_goldens_say_what_made_them():
    for name in ("smollm2.json", "qwen2.5.json", "sentencepiece.json"):
        assert set(golden(name)["made_with"]) == {"llama-cpp-python", "gguf"}


def test_a_character_that_has_no_token_is_refused():
    backend = Backend(models.Unigram([("a", -1.0)], None, False))
    with pytest.raises(InputError, match="its tokenizer fails on this text"):
        Tokenizer(backend, eos_ids=[], where="tiny").encode("b")
