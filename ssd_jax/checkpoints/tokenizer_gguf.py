"""The tokenizer that a GGUF file describes in its metadata (llama.cpp's `tokenizer.*` keys)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ssd_jax.checkpoints.byte_level import PRE_TOKENIZERS, byte_level_bpe, canonical_pre_tokenizer
from ssd_jax.checkpoints.post_processing import begin_with
from ssd_jax.checkpoints.sentencepiece import sentencepiece_bpe
from ssd_jax.checkpoints.tokenizer import Tokenizer
from ssd_jax.errors import InputError
from ssd_jax.files import GET_AGAIN, brief, shown

if TYPE_CHECKING:
    import tokenizers

# Values of `tokenizer.ggml.token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

# Control tokens that end a turn or a text in the families we load. Files often name only one of
# them as EOS; llama.cpp, too, finds the others by their text.
_END_TOKENS = frozenset(
    {"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "</s>"}
)
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
}  # as templates call them; a padding token may lie among the padding rows and is not needed
_LONGEST_TOKEN = 4096
"""Characters; the longest of published vocabularies have some hundreds."""
_SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, where: str) -> Tokenizer:
    """Build the tokenizer of a GGUF file.

    Args:
      metadata: plain Python values by GGUF key.
      where: the file's name, for error messages.

    Raises:
      InputError: a kind of tokenizer that is not supported, or incomplete or damaged metadata.
    """
    _check_types(metadata, where)
    model = _required(metadata, "tokenizer.ggml.model", where)
    if model not in ("gpt2", "llama"):
        raise InputError(
            f"{where}: tokenizer.ggml.model is {shown(model)}; supported are 'gpt2' (byte-level "
            "BPE) and 'llama' (sentencepiece). Load the model from its Hugging Face directory"
        )
    tokens = list(_required(metadata, "tokenizer.ggml.tokens", where))
    types = list(metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens)))
    _check_vocabulary(tokens, types, where)
    while types and types[-1] == _UNUSED:  # padding rows at the end are no part of the vocabulary
        tokens.pop()
        types.pop()
    ids = _named_ids(metadata, model, size=len(tokens), where=where)
    if model == "gpt2":
        backend = _byte_level(metadata, tokens, where)
    else:
        backend = _sentencepiece(metadata, tokens, types, ids["unknown_token_id"], where)
    ends = {ids[name] for name in ("eos_token_id", "eot_token_id", "eom_token_id") if name in ids}
    special = {i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}
    special.update(ids.values())
    _add_tokens(backend, tokens, types, special)
    if _adds_bos(metadata, model) and "bos_token_id" in ids:
        begin_with(backend, ids["bos_token_id"])
    return Tokenizer(
        backend,
        eos_ids=ends | {i for i in special if tokens[i] in _END_TOKENS},
        bos_id=ids.get("bos_token_id"),
        special_tokens={role: tokens[ids[name]] for role, name in _ROLES.items() if name in ids},
        chat_template=metadata.get("tokenizer.chat_template"),
        where=where,
    )


_KINDS: Mapping[str, tuple[type, ...]] = {
    "ggml.model": (str,),
    "ggml.pre": (str,),
    "ggml.add_bos_token": (bool,),
    "ggml.add_space_prefix": (bool,),
    "chat_template": (str,),
    **{f"ggml.{name}": (int,) for name in (*_ROLES.values(), "eot_token_id", "eom_token_id")},
}
_ITEMS: Mapping[str, tuple[type, ...]] = {
    "ggml.tokens": (str,),
    "ggml.merges": (str,),
    "ggml.token_type": (int,),
    "ggml.scores": (int, float),
}


def _check_types(metadata: Mapping[str, Any], where: str) -> None:
    """Raise InputError unless what there is has the types that llama.cpp gives it."""
    for key, kinds in _KINDS.items():
        value = metadata.get(f"tokenizer.{key}")
        if value is not None and type(value) not in kinds:
            raise InputError(
                f"{where}: tokenizer.{key} is {shown(value)}, which must be of type "
                f"{kinds[0].__name__}; {GET_AGAIN}"
            )
    for key, kinds in _ITEMS.items():
        value = metadata.get(f"tokenizer.{key}", [])
        if not isinstance(value, list) or not {type(item) for item in value} <= set(kinds):
            raise InputError(
                f"{where}: tokenizer.{key} must be a list with items of type {kinds[-1].__name__}, "
                f"not {shown(value)}; {GET_AGAIN}"
            )


def _required(metadata: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in metadata:
        raise InputError(
            f"{where} has no {key}: its tokenizer is missing; convert the model to GGUF again, "
            "or load its Hugging Face directory"
        )
    return metadata[key]


def _check_vocabulary(tokens: list[str], types: list[int], where: str) -> None:
    if len(types) != len(tokens):
        raise InputError(
            f"{where}: {len(types)} entries in tokenizer.ggml.token_type for {len(tokens)} tokens; "
            "the file is damaged, fetch it again"
        )
    longest = max(tokens, key=len, default="")
    if len(longest) > _LONGEST_TOKEN:
        raise InputError(
            f"{where}: the token {shown(longest)} has {len(longest)} characters, the limit is "
            f"{_LONGEST_TOKEN}; {GET_AGAIN}"
        )
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise InputError(
            f"{where}: the token {shown(twice)} stands twice in tokenizer.ggml.tokens; "
            "convert the model to GGUF again"
        )


def _named_ids(metadata: Mapping[str, Any], model: str, *, size: int, where: str) -> dict[str, int]:
    """Return the ids that the file gives a role, by the last part of their key."""
    names = [*_ROLES.values(), "eot_token_id", "eom_token_id"]
    given = {name: metadata.get(f"tokenizer.ggml.{name}") for name in names}
    ids = {name: int(value) for name, value in given.items() if value is not None}
    if model == "llama":
        ids = _SENTENCEPIECE_IDS | ids
    for name, token_id in ids.items():
        if not 0 <= token_id < size:
            raise InputError(
                f"{where}: tokenizer.ggml.{name} is {token_id}, but the vocabulary has {size} "
                "tokens; convert the model to GGUF again"
            )
    return ids


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre = canonical_pre_tokenizer(name)
    if pre is None:
        raise InputError(
            f"{where}: the pre-tokenizer {shown(name)} (tokenizer.ggml.pre) is not supported; "
            f"supported are {', '.join(PRE_TOKENIZERS)}. Load the model from its Hugging Face "
            "directory"
        )
    merges = _required(metadata, "tokenizer.ggml.merges", where)
    try:
        return byte_level_bpe(tokens, merges, pre=pre)
    except ValueError as error:
        raise InputError(
            f"{where}: tokenizer.ggml.merges does not fit the vocabulary: {brief(error)}; "
            "convert the model to GGUF again"
        ) from error


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], unknown_id: int, where: str
) -> tokenizers.Tokenizer:
    scores = _required(metadata, "tokenizer.ggml.scores", where)
    if len(scores) < len(tokens):
        raise InputError(
            f"{where}: {len(scores)} entries in tokenizer.ggml.scores for {len(tokens)} tokens; "
            "the file is damaged, fetch it again"
        )
    if not all(map(math.isfinite, scores)):
        raise InputError(f"{where}: tokenizer.ggml.scores has a score that is no number")
    return sentencepiece_bpe(
        tokens,
        scores,
        unknown_id=unknown_id,
        space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
    )


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: list[str], types: list[int], special: set[int]
) -> None:
    """Let the tokenizer find special and user-defined tokens in a text before anything else."""
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(token, special=i in special, normalized=False)
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if i in special or kind == _USER_DEFINED
        ]
    )


def _adds_bos(metadata: Mapping[str, Any], model: str) -> bool:
    """Whether a text begins with BOS; without the key, llama.cpp's default for the tokenizer."""
    pre = canonical_pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
    default = model == "llama" or pre == "llama-bpe"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))
