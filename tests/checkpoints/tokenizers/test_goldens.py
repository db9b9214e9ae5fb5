"""Token ids equal llama.cpp's (tests/oracle/make_tokenizer_goldens.py) and give back the text."""

from __future__ import annotations

import pytest

from ssd_jax.checkpoints.gguf.header import read_header
from ssd_jax.checkpoints.tokenizers.gguf import tokenizer_from_gguf
from tests.checkpoints.tokenizers.conftest import golden

PAPERCLIP = [{"role": "user", "content": "Name three uses of a paperclip."}]
# fmt: off
SMOLLM2_PROMPT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 5820, 1296, 2925, 282, 253, 1941, 14194, 30, 2, 198, 1, 520,
    9531, 198,
]
QWEN_PROMPT = [
    151644, 8948, 198, 2610, 525, 1207, 16948, 11, 3465, 553, 54364, 14817, 13, 1446, 525, 264,
    10950, 17847, 13, 151645, 198, 151644, 872, 198, 675, 2326, 5711, 315, 264, 5567, 7974, 13,
    151645, 198, 151644, 77091, 198,
]
# fmt: on


def assert_same(tokenizer, texts, ids):
    assert len(texts) == len(ids) >= 80
    assert {text: tokenizer.encode(text) for text in texts} == dict(zip(texts, ids, strict=True))


def assert_round_trip(tokenizer, texts):
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2", "default"])
def test_smollm2_text_has_the_golden_ids_of_each_pre_tokenizer(smollm2_metadata, texts, pre):
    # The file itself says that no BOS is added, also where that is not the pre-tokenizer's default.
    changed = {**smollm2_metadata, "tokenizer.ggml.pre": pre}
    tokenizer = tokenizer_from_gguf(changed, where=pre)
    assert_same(tokenizer, texts, golden("smollm2.json")["ids"][pre])
    assert_round_trip(tokenizer, texts)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_text_has_the_golden_ids(texts, prefix):
    stored = golden("sentencepiece.json")
    changed = {**stored["metadata"], "tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = tokenizer_from_gguf(changed, where="golden")
    assert_same(tokenizer, texts, stored["ids"][str(prefix).lower()])
    assert_round_trip(tokenizer, texts)


def test_streamed_text_equals_the_text(smollm2, small_sentencepiece, texts):
    for tokenizer in (smollm2, small_sentencepiece):
        for text in texts:
            ids = tokenizer.encode(text)
            detokenizer = tokenizer.open_stream()
            pieces = [detokenizer.push([token]) for token in ids]
            assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(
                ids, skip_special_tokens=True
            )


def test_smollm2_chat_prompt_has_the_golden_ids(smollm2):
    assert smollm2.apply_chat_template(PAPERCLIP, add_generation_prompt=True) == SMOLLM2_PROMPT


def test_smollm2_special_tokens_have_the_golden_ids(smollm2):
    assert smollm2.size == 49152
    assert smollm2.bos_id == 1
    assert smollm2.token(2) == "<|im_end|>"
    assert smollm2.eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert smollm2.special_ids == set(range(17))


@pytest.mark.slow
def test_qwen_text_has_the_golden_ids(qwen_draft_path, texts):
    tokenizer = tokenizer_from_gguf(read_header(qwen_draft_path).metadata, where="Qwen")
    assert_same(tokenizer, texts, golden("qwen2.5.json")["ids"])
    assert_round_trip(tokenizer, texts)
    assert tokenizer.apply_chat_template(PAPERCLIP, add_generation_prompt=True) == QWEN_PROMPT
    assert tokenizer.size == 151665  # the file has 151936 rows; the rest is padding
    assert tokenizer.eos_ids == {151643, 151645}
