"""Shards: completions as token ids, and beside them the target's scores at each position.

A shard is a safetensors file of flat arrays. Token ids are uint16 where the vocabulary allows,
else uint32; probabilities are float16, whose rounding (1 in 2,000) is far below what a draft can
learn. Nothing is read that the manifest does not vouch for.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ssd_jax.errors import InputError
from ssd_jax.system.files import brief, read_bytes, require_plain_name, shown
from ssd_jax.tools.distill.manifest import read_manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A text to learn from.

    Attributes:
      tokens: [n] int32, prompt then completion.
      prompt_length: number of tokens of the prompt, whose prediction is not learnt; 0 for a passage
        of plain text, all of which is learnt.
      top_ids: [n, N] as in the shard: the likeliest ids of the token after position i, likeliest
        first, by the target at temperature 1; None where they were not kept.
      top_probs: [n, N] float16, as in the shard: their probabilities, not renormalised; 0 at
        positions whose next token is not to be learnt.
    """

    tokens: np.ndarray
    prompt_length: int
    top_ids: np.ndarray | None = None
    top_probs: np.ndarray | None = None

    @property
    def learnt(self) -> range:
        """Positions whose next token is to be learnt."""
        return range(max(self.prompt_length - 1, 0), len(self.tokens) - 1)


def id_dtype(vocabulary: int) -> np.dtype:
    """The smallest type that holds every id of a vocabulary."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)


def encode_texts(samples: Sequence[Sample], vocabulary: int) -> bytes:
    """A shard of samples without the target's scores."""
    return save(
        {
            "tokens": np.concatenate([s.tokens for s in samples]).astype(id_dtype(vocabulary)),
            "lengths": np.array([len(s.tokens) for s in samples], np.uint32),
            "prompt_lengths": np.array([s.prompt_length for s in samples], np.uint32),
        }
    )


def encode_scores(ids: np.ndarray, probs: np.ndarray, vocabulary: int) -> bytes:
    """Scores [rows, N] of the learnt positions of a shard's samples, one sample after the other."""
    return save({"ids": ids.astype(id_dtype(vocabulary)), "probs": probs.astype(np.float16)})


def decode_texts(data: bytes) -> list[Sample]:
    """What `encode_texts` encoded."""
    arrays = load(data)
    parts = np.split(arrays["tokens"].astype(np.int32), np.cumsum(arrays["lengths"])[:-1])
    return [
        Sample(tokens=tokens, prompt_length=int(length))
        for tokens, length in zip(parts, arrays["prompt_lengths"], strict=True)
    ]


def with_scores(samples: Sequence[Sample], data: bytes) -> list[Sample]:
    """The samples with scores from `encode_scores`, in its types: training holds all of them."""
    arrays = load(data)
    ends = np.cumsum([len(sample.learnt) for sample in samples])[:-1]
    parts = [np.split(arrays[name], ends) for name in ("ids", "probs")]
    results = []
    for sample, *scores in zip(samples, *parts, strict=True):
        padded = [np.zeros((len(sample.tokens), part.shape[1]), part.dtype) for part in scores]
        for array, part in zip(padded, scores, strict=True):
            array[sample.learnt.start : sample.learnt.stop] = part
        results.append(dataclasses.replace(sample, top_ids=padded[0], top_probs=padded[1]))
    return results


def read_file(directory: Path, entry: Mapping[str, Any]) -> bytes:
    """The bytes of a file that the manifest lists.

    Raises:
      InputError: it is gone, or not what was written.
    """
    path = directory / require_plain_name(entry["file"], directory)
    data = read_bytes(path, remedy=_remedy(directory))
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry["sha256"]:
        raise InputError(
            f"{path} is damaged: its sha256 is {digest}, the manifest has {entry['sha256']}; "
            f"{_remedy(directory)}"
        )
    return data


def read_shards(directory: Path, *, target: str | None = None) -> Iterator[Sample]:
    """All samples in order.

    The manifest and the sizes of files are checked at once, each file when its turn comes.

    Args:
      target: digest of the target that they must be of; None is any.

    Raises:
      InputError: not complete, another target, or a file that is missing or cut off; later, a
        damaged file.
    """
    manifest = read_manifest(directory)
    if manifest is None or not manifest.finished:
        raise InputError(f"{directory} has no complete shards; run --stage={directory.name} first")
    text_target = manifest.inputs.get("target")
    if target is not None and text_target != target:
        raise InputError(
            f"{directory} is text of another target: sha256 {shown(text_target)}, this one "
            f"has {target}; name that target, or give another --out"
        )
    try:
        shards = [(entry, entry["scores"]) for entry in manifest.data["shards"]]
        files = [file for shard in shards for file in shard if file is not None]
        sizes = {directory / require_plain_name(f["file"], directory): f["bytes"] for f in files}
        _ = [file["sha256"] for file in files]
    except (LookupError, TypeError) as error:
        raise InputError(
            f"{directory} has a damaged manifest: {shown(error)}; {_remedy(directory)}"
        ) from None
    for path, expected in sizes.items():
        size = path.stat().st_size if path.is_file() else 0
        if size != expected:
            raise InputError(
                f"{path} has {size} bytes, the manifest has {shown(expected)}; {_remedy(directory)}"
            )
    return (sample for texts, scores in shards for sample in _samples(directory, texts, scores))


def _samples(
    directory: Path, texts: Mapping[str, Any], scores: Mapping[str, Any] | None
) -> list[Sample]:
    try:
        samples = decode_texts(read_file(directory, texts))
        return samples if scores is None else with_scores(samples, read_file(directory, scores))
    except (ValueError, TypeError, LookupError, SafetensorError) as error:
        raise InputError(
            f"{directory / texts['file']}: {brief(error)}; {_remedy(directory)}"
        ) from None


def _remedy(directory: Path) -> str:
    return f"run --stage={directory.name} again, which makes what is missing or damaged"
