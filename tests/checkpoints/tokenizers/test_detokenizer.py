from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from ssd_jax.checkpoints.tokenizers.detokenizer import WindowStream
from ssd_jax.checkpoints.tokenizers.gguf import tokenizer_from_gguf
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from tests.checkpoints.builders import TOKENS, metadata

N = len(TOKENS)
ANY_SCRIPT = "né à 你好 👩‍🚀 ½ नमस्ते 🇫🇷 한국어 \u2028 ok"


def byte_level():
    """One token a byte, some words, a control token: random ids are mostly invalid UTF-8."""
    return tokenizer_from_gguf(metadata(("<end>", 3), ("<tool>", 4)), where="tiny")


def window_tokenizer(decoder) -> Tokenizer:
    """Words whose text depends on their neighbours."""
    words = ["\u2581one", "\u2581two", "##s", "\u2581", "\ufffd", "é", "<end>"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, "é"))
    backend.add_special_tokens(["<end>"])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend, eos_ids=[], where="tiny")


def streamed(tokenizer, ids, rng):
    """The text of `ids`, pushed in chunks of random sizes, empty ones among them."""
    detokenizer, pieces, begin = tokenizer.open_stream(), [], 0
    while begin < len(ids):
        end = begin + rng.choice([0, 1, 1, 2, 7])
        pieces.append(detokenizer.push(ids[begin:end]))
        begin = end
    return "".join(pieces) + detokenizer.flush()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("length", [1, 40, 2000])
def test_streamed_random_ids_equal_decode(smollm2, small_sentencepiece, seed, length):
    rng = random.Random(seed)
    for tokenizer in (smollm2, small_sentencepiece, byte_level()):
        ids = [rng.randrange(tokenizer.size + 3) for _ in range(length)]
        assert streamed(tokenizer, ids, rng) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(cleanup=False), decoders.Metaspace(), decoders.Fuse()]
)
def test_streamed_random_ids_equal_decode_for_other_decoders(decoder, seed):
    rng = random.Random(seed)
    tokenizer = window_tokenizer(decoder)
    ids = [rng.randrange(tokenizer.size) for _ in range(60)]
    assert streamed(tokenizer, ids, rng) == tokenizer.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=True) == tokenizer._backend.decode(ids)


@pytest.mark.parametrize("skip_special", [True, False])
def test_byte_level_text_equals_that_of_the_tokenizers_package(smollm2, skip_special):
    rng = random.Random(0)
    for length in [1, 2, 3, 10, 500] * 20:
        ids = [rng.randrange(smollm2.size) for _ in range(length)]
        expected = smollm2._backend.decode(ids, skip_special_tokens=skip_special)
        assert smollm2.decode(ids, skip_special_tokens=skip_special) == expected


def test_sentencepiece_text_is_its_bytes(small_sentencepiece):
    rng = random.Random(0)
    first_byte = small_sentencepiece.encode("\x00", add_special_tokens=False)[-1]
    for length in [1, 2, 5, 300] * 20:
        data = bytes(rng.choice(b" a\xe4\xbd\xa0\xff") for _ in range(length))
        text = small_sentencepiece.decode(
            [first_byte + byte for byte in data], skip_special_tokens=True
        )
        assert text == data.removeprefix(b" ").decode(errors="replace")


@pytest.mark.parametrize("name", ["smollm2", "small_sentencepiece"])
def test_half_characters_are_never_returned(name, request):
    tokenizer = request.getfixturevalue(name)
    detokenizer = tokenizer.open_stream()
    text, held_back = "", 0
    for token in tokenizer.encode(ANY_SCRIPT):
        piece = detokenizer.push([token])
        text += piece
        held_back += not piece
        assert ANY_SCRIPT.startswith(text)
    assert text == ANY_SCRIPT  # nothing complete waits for the flush
    assert detokenizer.flush() == ""
    assert held_back > 10  # the text does have characters of several tokens


def test_an_unfinished_character_comes_with_the_flush():
    tokenizer = byte_level()
    rocket = tokenizer.encode("🚀")
    detokenizer = tokenizer.open_stream()
    assert [detokenizer.push([token]) for token in rocket[:-1]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_broken_character_is_replaced_as_soon_as_it_is_broken():
    tokenizer = byte_level()
    detokenizer = tokenizer.open_stream()
    assert detokenizer.push(tokenizer.encode("🚀")[:2]) == ""
    assert detokenizer.push(tokenizer.encode("a")) == "\ufffda"


def test_other_decoders_do_not_return_half_characters_either():
    backend = Backend(models.BPE({f"<0x{b:02X}>": b for b in range(256)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Tokenizer(backend, eos_ids=[], where="tiny").open_stream()
    assert [detokenizer.push([byte]) for byte in "aé".encode()] == ["a", "", "é"]


def test_special_tokens_are_skipped_inside_a_character():
    tokenizer = byte_level()
    first, *rest = tokenizer.encode("é")
    assert tokenizer.open_stream().push([first, N, *rest, N + 1]) == "é<tool>"


def test_single_special_tokens_may_be_visible():
    tokenizer = byte_level()
    assert tokenizer.open_stream(visible_ids=[N]).push([N]) == tokenizer.token(N)


def test_sentencepiece_drops_only_the_first_space(small_sentencepiece):
    detokenizer = small_sentencepiece.open_stream()
    pieces = [detokenizer.push([i]) for i in small_sentencepiece.encode("  one  two")]
    assert "".join(pieces) == "  one  two"
    without_prefix = small_sentencepiece.encode("a b", add_special_tokens=False)[1:]
    assert small_sentencepiece.decode(without_prefix, skip_special_tokens=True) == "b"


def test_the_continuation_of_a_text_keeps_its_first_space(small_sentencepiece):
    prompt = small_sentencepiece.encode("a")
    *_, word = small_sentencepiece.encode("a b")
    assert small_sentencepiece.open_stream(prompt[-1]).push([word]) == " b"
    special = min(small_sentencepiece.special_ids)
    for after in (None, special):
        assert small_sentencepiece.open_stream(after).push([word]) == "b"


def test_a_window_begins_with_the_token_before_it():
    tokenizer = window_tokenizer(decoders.Metaspace())
    assert tokenizer.open_stream(0).push([1, 0]) == " two one"
    assert (
        tokenizer.open_stream().push([1, 0])
        == tokenizer.decode([1, 0], skip_special_tokens=True)
        == "two one"
    )


def test_the_window_does_not_grow_with_the_text():
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return " ".join(map(str, ids))

    stream = WindowStream(decode)
    assert stream.push(range(500)) == " ".join(map(str, range(500)))
    assert max(lengths) == 2
