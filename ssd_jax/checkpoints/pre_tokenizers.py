"""Pre-tokenizers of byte-level BPE for the supported families, by their names in GGUF files."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

# Names are llama.cpp's (`tokenizer.ggml.pre`). The patterns are those in the tokenizer.json files
# of Qwen2 and Llama 3; llama.cpp's own patterns cut the same pieces.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_NO_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_NO_WORDS}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_NO_WORDS}"
_DEFAULT = (  # llama.cpp's choice for files that name none
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

PRE_TOKENIZERS = ("smollm", "qwen2", "llama-bpe", "gpt-2", "default")
SAME_AS = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def pre_tokenizer(pre: str) -> PreTokenizer:
    """The pre-tokenizer that cuts a text into words, each written in the byte alphabet.

    Args:
      pre: an entry of PRE_TOKENIZERS.
    """
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's pattern
    if pre == "gpt-2":
        return words
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    patterns = {"qwen2": (_QWEN2,), "llama-bpe": (_LLAMA3,)}.get(pre, _DEFAULT)
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, bytes_only])
