"""Pre-tokenizers of byte-level BPE for the supported families, by their names in GGUF files."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

# Names are llama.cpp's (`tokenizer.ggml.pre`). The patterns are those in the tokenizer.json files
# of the models; llama.cpp's own patterns cut the same pieces, of tekken and gpt-4o only in texts
# whose cased letters are ASCII.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_NO_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_NO_WORDS}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_NO_WORDS}"
_CAPITALS, _LETTERS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CASED = rf"{_BEFORE}[{_CAPITALS}]*[{_LETTERS}]+", rf"{_BEFORE}[{_CAPITALS}]+[{_LETTERS}]*"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_NO_CASED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_NO_CASED}"
_GPT_4O = rf"{_CASED[0]}{_SUFFIX}|{_CASED[1]}{_SUFFIX}|\p{{N}}{{1,3}}|{_NO_CASED}"
_SEED = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_EXAONE_MOE = (  # words that single spaces part are one piece
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_JAIS = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}|\s"
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_PATTERNS = {
    "qwen2": (_QWEN2,),
    "llama-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT_4O,),
    "seed-coder": (_SEED,),
    "jais-2": (_JAIS,),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK,
    "exaone-moe": (_EXAONE_MOE,),
}
_DEFAULT = (  # llama.cpp's choice for files that name none
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

PRE_TOKENIZERS = ("smollm", *_PATTERNS, "gpt-2", "default")
SAME_AS = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "pixtral": "llama-bpe",
    "falcon3": "llama-bpe",
    "midm-2.0": "llama-bpe",
    "smaug-bpe": "dbrx",
    "glm4": "dbrx",
    "chatglm-bpe": "dbrx",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "exaone": "smollm",
    "codeshell": "smollm",
    **dict.fromkeys(("olmo", "exaone4", "trillion", "mellum", "phi-2", "a.x-4.0"), "gpt-2"),
    "minimax-m2": "gpt-4o",
    "deepseek-r1-qwen": "qwen2",
    "stablelm2": "qwen2",
    "hunyuan": "qwen2",
    "solar-open": "qwen2",
    "kormo": "qwen2",
    "hunyuan-dense": "deepseek-v3",
}
"""Other names, of SmolLM 3 (smaug-bpe), Granite (refact), OLMo 2 and Phi 4 (dbrx) among them."""

WHOLE_WORDS = ("llama-bpe", "tekken")
"""Those of models that look up a whole word before merging, and begin texts with a BOS."""


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
    patterns = _PATTERNS.get(pre, _DEFAULT)
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, bytes_only])
