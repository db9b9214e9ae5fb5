"""The tokenizer that a GGUF file describes in its metadata (llama.cpp's `tokenizer.*` keys)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from ssd_jax.checkpoints.chat.template import DEFAULT
from ssd_jax.checkpoints.chat.template_files import named
from ssd_jax.checkpoints.tokenizers.detokenizer import SPACE_MARK
from ssd_jax.checkpoints.tokenizers.pre_tokenizers import (
    PRE_TOKENIZERS,
    SAME_AS,
    WHOLE_WORDS,
    pre_tokenizer,
)
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer, begin_with
from ssd_jax.errors import InputError
from ssd_jax.system.files import GET_AGAIN, brief, shown

# Values of `tokenizer.ggml.token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

# Tokens that end a turn or a text in the supported families. Files often name only one of them as
# EOS, and some have them as user-defined ones; llama.cpp, too, finds the others by their text.
_END_TOKENS = frozenset(
    [
        "<|endoftext|>",
        "<|im_end|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<eos>",
        "[EOS]",
        "[e~[",
        "<｜end▁of▁sentence｜>",
        "</s>",
    ]
)
_END_OF_MESSAGE = "<|end|>"
_SEVERAL_MESSAGES = {"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"}
"""Beside these, of gpt-oss and Solar Open, it ends one of the messages of an answer."""
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
}  # as templates call them; a padding token may lie among the padding rows and is not needed
_IDS = (*_ROLES.values(), "eot_token_id", "eom_token_id")
_SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
_MAX_TOKEN = 4096
"""Characters; the longest tokens of published vocabularies have some hundreds."""
_VALUE_TYPES: Mapping[str, type] = {
    "ggml.model": str,
    "ggml.pre": str,
    "ggml.add_bos_token": bool,
    "ggml.add_space_prefix": bool,
    "chat_template": str,
    **{f"ggml.{name}": int for name in _IDS},
}
_ITEM_TYPES: Mapping[str, tuple[type, ...]] = {
    "ggml.tokens": (str,),
    "ggml.merges": (str,),
    "chat_templates": (str,),
    "ggml.token_type": (int,),
    "ggml.scores": (int, float),
}
_CONVERT = "convert the model to GGUF again"


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, where: str) -> Tokenizer:
    """The tokenizer of a GGUF file with this metadata (plain values by key); `where` names it.

    Raises:
      InputError: the kind of tokenizer is not supported, or metadata are incomplete or damaged.
    """
    keys = _TokenizerKeys(metadata, where)
    model = keys.required("ggml.model")
    if model not in ("gpt2", "llama"):
        raise InputError(
            f"{where}: tokenizer.ggml.model is {shown(model)}; supported are 'gpt2' (byte-level "
            "BPE) and 'llama' (sentencepiece). Load the model from its Hugging Face directory"
        )
    tokens, types = _vocabulary(keys)
    ids = _named_ids(keys, model, len(tokens))
    pre: str = keys.get("ggml.pre", "default")
    pre = SAME_AS.get(pre, pre)
    special = {i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)} | {*ids.values()}
    user_defined = (i for i, kind in enumerate(types) if kind == _USER_DEFINED)
    special |= {i for i in user_defined if tokens[i] in _END_TOKENS}
    if model == "gpt2":
        backend = _byte_level(keys, tokens, pre)
    else:
        backend = _sentencepiece(keys, tokens, ids["unknown_token_id"], special)
    _add_tokens(backend, tokens, types, special)
    # Without the key, llama.cpp's default for the tokenizer applies.
    adds_bos = keys.get("ggml.add_bos_token", model == "llama" or pre in WHOLE_WORDS)
    if adds_bos and "bos_token_id" in ids:
        begin_with(backend, ids["bos_token_id"])
    eos_ids = {
        ids[name] for name in ("eos_token_id", "eot_token_id", "eom_token_id") if name in ids
    }
    by_text = {tokens[i]: i for i in special if tokens[i] in _END_TOKENS}
    if any(ends <= by_text.keys() for ends in _SEVERAL_MESSAGES):
        by_text.pop(_END_OF_MESSAGE, None)
    return Tokenizer(
        backend,
        eos_ids=eos_ids | {*by_text.values()},
        bos_id=ids.get("bos_token_id"),
        special_tokens={role: tokens[ids[name]] for role, name in _ROLES.items() if name in ids},
        chat_template=_templates(keys),
        where=where,
    )


def _templates(keys: _TokenizerKeys) -> str | Mapping[str, str] | None:
    """The Jinja source of the chat template, or sources by name."""
    sources = {name: keys.get(f"chat_template.{name}") for name in keys.get("chat_templates", [])}
    for name, source in sources.items():
        if not isinstance(source, str):
            raise InputError(
                f"{keys.where}: tokenizer.chat_templates names {shown(name)}, and "
                f"tokenizer.chat_template.{name} is {shown(source)}; {_CONVERT}"
            )
    default = keys.get("chat_template")
    sources = sources if default is None else {**sources, DEFAULT: default}
    return named(sources, Path(keys.where)) if sources else None


class _TokenizerKeys:
    """Values under `tokenizer.`, checked to have the types that llama.cpp gives them."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata, self.where = metadata, where
        for key, kind in _VALUE_TYPES.items():
            value = self.get(key)
            if value is not None and type(value) is not kind:
                raise InputError(
                    f"{where}: tokenizer.{key} is {shown(value)}, which must be of type "
                    f"{kind.__name__}; {GET_AGAIN}"
                )
        for key, kinds in _ITEM_TYPES.items():
            value = self.get(key, [])
            if not isinstance(value, list) or not {type(item) for item in value} <= set(kinds):
                raise InputError(
                    f"{where}: tokenizer.{key} must be a list with items of type "
                    f"{kinds[-1].__name__}, not {shown(value)}; {GET_AGAIN}"
                )

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.{key}", default)

    def required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise InputError(
                f"{self.where} has no tokenizer.{key}: its tokenizer is missing; {_CONVERT}, or "
                "load its Hugging Face directory"
            )
        return value


def _vocabulary(keys: _TokenizerKeys) -> tuple[list[str], list[int]]:
    """Tokens and their types by id, without the padding rows at the end."""
    where, tokens = keys.where, list(keys.required("ggml.tokens"))
    types = list(keys.get("ggml.token_type", [_NORMAL] * len(tokens)))
    if len(types) != len(tokens):
        raise InputError(
            f"{where}: {len(types)} entries in tokenizer.ggml.token_type for {len(tokens)} tokens; "
            "the file is damaged, fetch it again"
        )
    longest = max(tokens, key=len, default="")
    if len(longest) > _MAX_TOKEN:
        raise InputError(
            f"{where}: the token {shown(longest)} has {len(longest)} characters, the limit is "
            f"{_MAX_TOKEN}; {GET_AGAIN}"
        )
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        duplicate = next(token for token in tokens if token in seen or seen.add(token))
        raise InputError(
            f"{where}: the token {shown(duplicate)} stands twice in tokenizer.ggml.tokens; "
            f"{_CONVERT}"
        )
    # Older files have their padding as user-defined tokens of such names.
    while types and (types[-1] == _UNUSED or tokens[-1] == f"[PAD{len(tokens) - 1}]"):
        tokens.pop()
        types.pop()
    return tokens, types


def _named_ids(keys: _TokenizerKeys, model: str, size: int) -> dict[str, int]:
    """The ids to which the file gives a role, by the last part of their key."""
    ids = dict(_SENTENCEPIECE_IDS) if model == "llama" else {}
    ids |= {name: i for name in _IDS if (i := keys.get(f"ggml.{name}")) is not None}
    for name, token_id in ids.items():
        if not 0 <= token_id < size:
            raise InputError(
                f"{keys.where}: tokenizer.ggml.{name} is {token_id}, but the vocabulary has {size} "
                f"tokens; {_CONVERT}"
            )
    return ids


def _byte_level(keys: _TokenizerKeys, tokens: list[str], pre: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer; `tokens` are in GPT-2's byte alphabet."""
    if pre not in PRE_TOKENIZERS:
        raise InputError(
            f"{keys.where}: the pre-tokenizer {shown(pre)} (tokenizer.ggml.pre) is not supported; "
            f"supported are {', '.join(PRE_TOKENIZERS)}. Load the model from its Hugging Face "
            "directory"
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = (merge.partition(" ") for merge in keys.required("ggml.merges"))  # best first
    pairs = [(left, right) for left, _, right in merges]
    try:
        # No merges lead to some of the tokens that are whole words.
        model = models.BPE(vocab, pairs, ignore_merges=pre in WHOLE_WORDS)
    except Exception as error:  # `tokenizers` raises bare exceptions
        raise InputError(
            f"{keys.where}: tokenizer.ggml.merges does not fit the vocabulary: {brief(error)}; "
            f"{_CONVERT}"
        ) from error
    backend = tokenizers.Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    keys: _TokenizerKeys, tokens: list[str], unknown_id: int, special: Set[int]
) -> tokenizers.Tokenizer:
    """A sentencepiece tokenizer, of Llama 2 and its kin, with byte fallback.

    Source: the conversion in `transformers.convert_slow_tokenizer` (LlamaConverter, legacy form),
    which puts the space prefix before every stretch of text between special tokens, as llama.cpp
    does.
    """
    scores = keys.required("ggml.scores")
    if len(scores) < len(tokens):
        raise InputError(
            f"{keys.where}: {len(scores)} entries in tokenizer.ggml.scores for {len(tokens)} "
            "tokens; the file is damaged, fetch it again"
        )
    if not all(map(math.isfinite, scores)):
        raise InputError(f"{keys.where}: tokenizer.ggml.scores has a score that is no number")
    model = models.BPE(
        {token: token_id for token_id, token in enumerate(tokens)},
        _merges_by_score(tokens, scores, special),
        unk_token=tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    space_prefix = keys.get("ggml.add_space_prefix", True)  # `decode` removes it
    prefix = [normalizers.Prepend(SPACE_MARK)] if space_prefix else []
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE_MARK)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], special: Set[int]
) -> list[tuple[str, str]]:
    """Every pair of tokens that forms a token of words, best-scored result first, then lowest ids.

    As in sentencepiece, no pair forms a special token.
    """
    id_of = {token: token_id for token_id, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int]] = []
    for token, token_id in id_of.items():
        if token_id in special:
            continue
        for split in range(1, len(token)):
            left, right = id_of.get(token[:split]), id_of.get(token[split:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, left, right in ranked]


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: list[str], types: list[int], special: set[int]
) -> None:
    """Makes the tokenizer find special and user-defined tokens in a text before all else."""
    backend.add_tokens(
        [
            AddedToken(token, special=i in special, normalized=False)
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if i in special or kind == _USER_DEFINED
        ]
    )
