"""BPE tokenizers from lists of tokens, merges and scores, as GGUF files have them.

Byte-level ones, of the GPT-2 lineage, with the pre-tokenizers of our families; and sentencepiece's,
of Llama 2 and its kin, with byte fallback. Special tokens and the post-processor are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ssd_jax.checkpoints.detokenizer import SPACE_MARK

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

# Names are llama.cpp's (`tokenizer.ggml.pre`). The patterns are those in the tokenizer.json files
# of Qwen2 and Llama 3; llama.cpp's own ones cut the same pieces.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_DEFAULT = (  # llama.cpp's choice for files that name none
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

PRE_TOKENIZERS = ("smollm", "qwen2", "llama-bpe", "gpt-2", "default")
_SAME_AS = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def canonical_pre_tokenizer(name: str) -> str | None:
    """The entry of PRE_TOKENIZERS that llama.cpp's `name` stands for, or None."""
    name = _SAME_AS.get(name, name)
    return name if name in PRE_TOKENIZERS else None


def byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], *, pre: str) -> Tokenizer:
    """Builds a byte-level tokenizer.

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
    """What cuts a text into words, each then written in the byte alphabet."""
    from tokenizers import Regex, pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's pattern
    if pre == "gpt-2":
        return words
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    patterns = {"qwen2": (_QWEN2,), "llama-bpe": (_LLAMA3,)}.get(pre, _DEFAULT)
    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, bytes_only])


def sentencepiece_bpe(
    tokens: Sequence[str], scores: Sequence[float], *, unknown_id: int, space_prefix: bool
) -> Tokenizer:
    """Builds a sentencepiece tokenizer.

    Source: the conversion in `transformers.convert_slow_tokenizer` (LlamaConverter, legacy form),
    which puts the space prefix before every stretch of text between special tokens, as llama.cpp
    does.

    Args:
      tokens: by id; a space is written as SPACE_MARK, bytes as `<0x0A>`.
      scores: by id; of two possible merges the one that makes the better scored token comes first.
      unknown_id: the id of what is neither a token nor, for lack of byte tokens, bytes.
      space_prefix: a text begins with a space that `decode` takes away.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    backend = Tokenizer(
        models.BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            _merges_by_score(tokens, scores),
            unk_token=tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE_MARK)
    prefix = [normalizers.Prepend(SPACE_MARK)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, best scored result first, then lowest ids."""
    id_of = {token: token_id for token_id, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int]] = []
    for token, token_id in id_of.items():
        for cut in range(1, len(token)):
            left, right = id_of.get(token[:cut]), id_of.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, left, right in ranked]
