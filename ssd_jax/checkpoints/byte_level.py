"""Byte-level BPE tokenizers, as in the GPT-2 lineage, with the pre-tokenizers of our families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

# Names are llama.cpp's (`tokenizer.ggml.pre`). The patterns are those in the tokenizer.json files
# of Qwen2 and Llama 3; llama.cpp's own ones cut the same pieces.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"

PRE_TOKENIZERS = ("smollm", "qwen2", "llama-bpe", "gpt-2", "default")
_SAME_AS = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def canonical_pre_tokenizer(name: str) -> str | None:
    """Return the entry of PRE_TOKENIZERS that llama.cpp's `name` stands for, or None."""
    name = _SAME_AS.get(name, name)
    return name if name in PRE_TOKENIZERS else None


def byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], *, pre: str) -> Tokenizer:
    """Build the tokenizer; special tokens and the post-processor are the caller's.

    Args:
      tokens: by id, in GPT-2's byte alphabet.
      merges: by rank, the two parts separated by the one space.
      pre: an entry of PRE_TOKENIZERS.

    Raises:
      ValueError: a merge names parts or makes a token that the vocabulary does not have.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    # Llama 3 looks a whole word up before it merges: some of its tokens no merges lead to.
    try:
        model = models.BPE(vocab, pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # `tokenizers` raises bare exceptions
        raise ValueError(str(error)) from error
    backend = Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(pre: str) -> PreTokenizer:
    """Return what cuts a text into words, each then written in the byte alphabet."""
    from tokenizers import Regex, pre_tokenizers

    def split(pattern: str) -> PreTokenizer:
        return pre_tokenizers.Split(Regex(pattern), behavior="isolated")

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's pattern
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match pre:
        case "gpt-2":
            return words
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
        case "qwen2":
            return pre_tokenizers.Sequence([split(QWEN2), bytes_only])
        case "llama-bpe":
            return pre_tokenizers.Sequence([split(LLAMA3), bytes_only])
        case _:  # llama.cpp's choice for files that name none
            punctuation = split(r"[\p{P}\$\+<=>\^~\|]+")
            gpt2 = split(
                r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
            )
            digits = [split(r"\p{N}+"), split(r"[0-9][0-9][0-9]")]
            return pre_tokenizers.Sequence([punctuation, gpt2, *digits, bytes_only])
