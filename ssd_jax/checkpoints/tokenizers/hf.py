"""The tokenizer of a Hugging Face model directory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ssd_jax.checkpoints.chat.template_files import read_templates
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer, begin_with
from ssd_jax.errors import InputError
from ssd_jax.system.files import brief, is_unicode, read_json, read_text, shown

_MAX_TOKENIZER = 64 << 20
_ID = re.compile("[0-9]{1,10}")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """Builds the tokenizer of a directory from `tokenizer.json` and, if they exist,
    `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json`, `config.json` and
    the files of chat templates.

    Every id that any of these files names as EOS counts as one. The post-processor of
    `tokenizer.json` determines whether a BOS is added; `add_bos_token` counts if there is no
    post-processor and, for Llama's tokenizers, if it adds nothing.

    Raises:
      InputError: `tokenizer.json` is missing, or a file cannot be understood.
    """
    backend = _read_backend(path)
    # If both files name a token, tokenizer_config.json takes precedence.
    config = _read_optional(path / "special_tokens_map.json") | _read_optional(
        path / "tokenizer_config.json"
    )
    _add_tokens(backend, config, path)
    special_tokens = {
        role: _content(config[role], role, path) for role in _ROLES if config.get(role)
    }
    ids = {
        role: i
        for role, text in special_tokens.items()
        if (i := backend.token_to_id(text)) is not None
    }
    _mark_special(backend, [special_tokens[role] for role in ids])
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    models = [_read_optional(path / "generation_config.json"), _read_optional(path / "config.json")]
    eos_ids, bos_ids = (
        [i for model in models for i in _ids(model, key, path)]
        for key in ("eos_token_id", "bos_token_id")
    )
    adds_nothing = backend.post_processor is None or (
        "Llama" in str(config.get("tokenizer_class"))
        and not backend.num_special_tokens_to_add(False)
    )
    if adds_nothing and config.get("add_bos_token") and "bos_token" in ids:
        begin_with(backend, ids["bos_token"])
    return Tokenizer(
        backend,
        eos_ids=[*eos_ids, ids["eos_token"]] if "eos_token" in ids else eos_ids,
        bos_id=ids.get("bos_token", next(iter(bos_ids), None)),
        special_tokens={role: special_tokens[role] for role in ids},
        chat_template=read_templates(path, config),
        where=str(path),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.exists():
        raise InputError(
            f"{file} is missing; write it with transformers: "
            f"AutoTokenizer.from_pretrained('{path}').save_pretrained('{path}')"
        )
    text = read_text(file, max_bytes=_MAX_TOKENIZER)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # `tokenizers` raises bare exceptions
        raise InputError(f"{file} is no tokenizer: {brief(error)}; fetch the file again") from error
    # Some files contain the lengths of a training run.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_optional(file: Path) -> dict[str, Any]:
    """The object in a file, or an empty one if there is no such file."""
    return read_json(file) if file.exists() else {}


def _content(token: object, key: str, path: Path) -> str:
    """The text of a token given as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str) or not is_unicode(text):
        raise InputError(
            f"{path}/tokenizer_config.json: {key} must be a string or an object with 'content', "
            f"of Unicode text, not {shown(token)}"
        )
    return text


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Adds tokens that `tokenizer.json` may leave to tokenizer_config.json."""
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, Mapping) or not all(_ID.fullmatch(i) for i in entries):
        raise InputError(
            f"{path}/tokenizer_config.json: added_tokens_decoder must be an object with ids as "
            f"keys, not {shown(entries)}"
        )
    for key in sorted(entries, key=int):
        token_id, entry = int(key), entries[key]
        text = _content(entry, "added_tokens_decoder", path)
        options = entry if isinstance(entry, Mapping) else {}
        flags = {flag: options.get(flag) or False for flag in _FLAGS}
        if not all(value is True or value is False for value in flags.values()):
            raise InputError(
                f"{path}/tokenizer_config.json: {', '.join(_FLAGS)} of the token {text!r} must be "
                f"true or false, not {shown(flags)}"
            )
        backend.add_tokens([AddedToken(text, **flags)])
        if backend.token_to_id(text) != token_id:
            raise InputError(
                f"{path}: tokenizer_config.json gives the token {text!r} the id {token_id}, "
                f"tokenizer.json gives it {backend.token_to_id(text)}; fetch both files again"
            )
    for key in ("additional_special_tokens", "extra_special_tokens"):  # since transformers 5
        tokens = config.get(key) or []
        tokens = [*tokens.values()] if isinstance(tokens, Mapping) else tokens
        if not isinstance(tokens, list):
            raise InputError(
                f"{path}/tokenizer_config.json: {key} must be a list, not {shown(tokens)}"
            )
        _mark_special(backend, [_content(token, key, path) for token in tokens])


def _mark_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Makes tokens of the vocabulary special; their other flags stay as they are."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in texts:
        token = added.get(text, AddedToken(text, normalized=False))
        if backend.token_to_id(text) is not None and not token.special:
            token.special = True
            backend.add_tokens([token])


def _ids(config: Mapping[str, Any], key: str, path: Path) -> list[int]:
    """The ids under `key`: one, a list of them, or none."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise InputError(
            f"{path}: {key} must be an integer or a list of integers, from 0 on, not {shown(value)}"
        )
    return ids
