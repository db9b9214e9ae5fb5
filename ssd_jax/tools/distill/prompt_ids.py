"""Prompts in the target's tokens, and the files that keep them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ssd_jax.errors import InputError
from ssd_jax.system.atomic import write_file
from ssd_jax.system.files import brief, read_bytes, sha256_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptIds:
    """A prompt in the target's tokens.

    Attributes:
      set: built-in name or path, as the configuration has it; `PromptEntry.set`.
      index: its place among those of the set that the configuration chose, from 0.
      ids: what the target is given, chat template included.
      kind: its kind as the set names it; empty if it names none.
      plain: whether it is a passage of plain text, which is itself worth learning.
    """

    set: str
    index: int
    ids: list[int]
    kind: str = ""
    plain: bool = False


def write_prompts(directory: Path, prompts: dict[str, list[PromptIds]]) -> dict[str, str]:
    """Writes `train.safetensors` and `held_out.safetensors`; returns their SHA-256 by split."""
    digests = {}
    for split, split_prompts in prompts.items():
        sets = list(dict.fromkeys(prompt.set for prompt in split_prompts))
        kinds = list(dict.fromkeys(prompt.kind for prompt in split_prompts))
        data = save(
            {
                "ids": np.array(
                    [token for prompt in split_prompts for token in prompt.ids], np.uint32
                ),
                "lengths": np.array([len(prompt.ids) for prompt in split_prompts], np.uint32),
                "indices": np.array([prompt.index for prompt in split_prompts], np.uint32),
                "sets": np.array([sets.index(prompt.set) for prompt in split_prompts], np.uint32),
                "kinds": np.array(
                    [kinds.index(prompt.kind) for prompt in split_prompts], np.uint32
                ),
                "plain": np.array([prompt.plain for prompt in split_prompts], np.uint8),
                "names": np.frombuffer(json.dumps([sets, kinds]).encode(), np.uint8),
            }
        )
        write_file(directory / f"{split}.safetensors", data, durable=True)
        digests[split] = hashlib.sha256(data).hexdigest()
    return digests


def read_prompts(directory: Path, split: str, sha256: str) -> list[PromptIds]:
    """The prompts that `write_prompts` wrote of a split.

    Raises:
      InputError: the file is gone or not the one that was written.
    """
    path = directory / f"{split}.safetensors"
    try:
        if sha256_of(path) != sha256:
            raise ValueError("its sha256 differs from the manifest's")
        arrays = load(read_bytes(path))
        sets, kinds = json.loads(arrays["names"].tobytes())
        prompt_ids = np.split(arrays["ids"], np.cumsum(arrays["lengths"]))[:-1]
        columns = (arrays[name] for name in ("sets", "kinds", "indices", "plain"))
        return [
            PromptIds(
                set=sets[set_index],
                index=int(index),
                ids=ids.tolist(),
                kind=kinds[kind],
                plain=bool(plain),
            )
            for ids, set_index, kind, index, plain in zip(prompt_ids, *columns, strict=True)
        ]
    except (InputError, ValueError, TypeError, LookupError, SafetensorError) as error:
        raise InputError(f"{path}: {brief(error)}; remove {directory} to make it again") from None
