from __future__ import annotations

import pytest

from ssd_jax.checkpoints.gguf.header import read_header
from ssd_jax.checkpoints.tokenizers.gguf import tokenizer_from_gguf
from ssd_jax.checkpoints.tokenizers.tokenizer import first_difference, require_tokens
from ssd_jax.errors import InputError
from tests.checkpoints.builders import TOKENS, metadata

N = len(TOKENS)


def tokenizer(*added, **changes):
    return tokenizer_from_gguf(metadata(*added, **changes), where="tiny")


def test_equal_vocabularies_have_no_difference():
    assert first_difference(tokenizer(("<e>", 3)), tokenizer(("<e>", 3))) is None


def test_padding_may_differ():
    padded = tokenizer(("<e>", 3), ("[PAD0]", 5), ("[PAD1]", 5))
    assert first_difference(padded, tokenizer(("<e>", 3))) is None
    assert first_difference(tokenizer(("<e>", 3)), padded) is None


def test_the_first_differing_token_is_named():
    changed = [*TOKENS]
    changed[7], changed[9] = changed[9], changed[7]
    difference = first_difference(tokenizer(), tokenizer(tokens=changed))
    expected = f"id 7 is {TOKENS[7]!r} in the target and {TOKENS[9]!r} in the draft"
    assert difference == expected


def test_added_tokens_with_other_ids_differ():
    first, second = tokenizer(("<a>", 3), ("<b>", 3)), tokenizer(("<b>", 3), ("<a>", 3))
    expected = f"id {N} is '<a>' in the target and '<b>' in the draft"
    assert first_difference(first, second) == expected


def test_a_token_that_only_the_draft_has_differs():
    more, less = tokenizer(("<a>", 3)), tokenizer()
    assert first_difference(more, less) is None
    assert (
        first_difference(less, more) == f"id {N} is no token in the target and '<a>' in the draft"
    )


def test_roles_of_tokens_may_differ():
    first = tokenizer(("<e>", 3), ("<f>", 4), eos_token_id=N)
    second = tokenizer(("<e>", 4), ("<f>", 3), eos_token_id=N + 1)
    assert first_difference(first, second) is None


def test_require_tokens_accepts_equal_vocabularies():
    require_tokens(tokenizer(), tokenizer(("[PAD]", 5)), target_name="T", draft_name="D")


def test_require_tokens_names_models_sizes_and_difference():
    message = (
        rf"draft D \({N + 1} tokens\) .* target T \({N} tokens\): "
        rf"id {N} is no token in the target and '<a>' in the draft; use a draft"
    )
    with pytest.raises(InputError, match=message):
        require_tokens(tokenizer(), tokenizer(("<a>", 3)), target_name="T", draft_name="D")


def test_smollm2_and_a_small_vocabulary_differ(smollm2, small_sentencepiece):
    difference = first_difference(smollm2, small_sentencepiece)
    assert difference == "id 0 is '<|endoftext|>' in the target and '<unk>' in the draft"


@pytest.mark.slow
def test_the_qwen_pair_has_one_vocabulary(qwen_target_path, qwen_draft_path):
    pair = [
        tokenizer_from_gguf(read_header(path).metadata, where=str(path))
        for path in (qwen_target_path, qwen_draft_path)
    ]
    assert first_difference(*pair) is None
