"""Stage *prompts*: token ids of the training and the held-out prompts, apart from each other.

The split is by file: what is listed as held out never trains, nor does a training prompt that
shares a span with it (`leaks`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ssd_jax.checkpoints.tokenizer import Tokenizer
from ssd_jax.distill.manifest import write_atomic
from ssd_jax.distill.reading import Line, find, is_plain_text, passages, read_lines, read_plain
from ssd_jax.distill.settings import PromptEntry, PromptSettings
from ssd_jax.errors import InputError
from ssd_jax.files import brief, read_bytes, sha256_of
from ssd_jax.prompts import BadLine

SPAN = 13
"""Tokens."""


class HeldOut:
    """The spans of held-out texts.

    Args:
      texts: of each text its spellings in tokens, the usual one first. A text's first token may
        differ with what is before it, which matters only if the text is all that is compared.
      span: tokens that must not be shared.
    """

    def __init__(self, texts: Iterable[Sequence[Sequence[int]]], span: int = SPAN) -> None:
        self._spans: dict[int, set[bytes]] = {}
        for spellings in texts:
            if len(spellings[0]) > span:
                self._add(_spans(spellings[0], span), span)
                continue
            for tokens in spellings:
                if len(tokens):
                    self._add(_spans(tokens, len(tokens)), len(tokens))

    def leaks(self, tokens: Sequence[int]) -> bool:
        """Whether a training text of these tokens must not be used."""
        return any(
            not spans.isdisjoint(_spans(tokens, length)) for length, spans in self._spans.items()
        )

    def _add(self, spans: Iterable[bytes], length: int) -> None:
        self._spans.setdefault(length, set()).update(spans)


def _spans(tokens: Sequence[int], length: int) -> Iterable[bytes]:
    data, size = np.asarray(tokens, np.int32).tobytes(), 4 * length
    return (data[begin : begin + size] for begin in range(0, len(data) - size + 1, 4))


SPLITS = ("train", "held_out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptIds:
    """A prompt in the target's tokens.

    Attributes:
      set: built-in name or path, as the configuration has it.
      index: its place among those of the set that the configuration chose, from 0.
      ids: what the target is given, chat template included.
      plain: whether it is a passage of plain text, which is itself worth learning.
    """

    set: str
    index: int
    ids: list[int]
    plain: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Read:
    """A prompt before the choice, and what the leak check compares.

    Attributes:
      own: tokens of what is learnt from, if it trains.
      hidden: spellings of each text that must not leak, if it is held out; see `HeldOut`.
    """

    prompt: PromptIds
    own: list[int]
    hidden: Sequence[Sequence[list[int]]]


class PromptFiles:
    """The files that the settings name, found and checked, but not read.

    Args:
      settings: section [prompts].
      directory: where the files are.

    Raises:
      InputError: a file that does not exist, or prompts that would be in both splits.
    """

    def __init__(self, settings: PromptSettings, directory: Path) -> None:
        self._settings = settings
        self._paths = {
            entry.path: find(entry, directory)
            for split in SPLITS
            for entry in getattr(settings, split)
        }
        self._refuse_both()

    def digests(self) -> dict[str, str]:
        """SHA-256 of every file, by its path in the configuration."""
        return {name: sha256_of(path) for name, path in self._paths.items() if path is not None}

    def prepare(self, tokenizer: Tokenizer) -> tuple[dict[str, list[PromptIds]], dict[str, Any]]:
        """The prompts of each split, and what was counted.

        Raises:
          InputError: lines that cannot be read (all are listed), or a split without prompts.
        """
        read = self._read_all(tokenizer)
        held_out = HeldOut(text for item in read["held_out"] for text in item.hidden)
        kept: dict[str, list[PromptIds]] = {}
        counts: dict[str, Any] = {}
        for split in SPLITS:
            sets = {e.path: Counter(kept=0, too_long=0) for e in getattr(self._settings, split)}
            kept[split] = []
            for item in read[split]:
                fate = self._fate(item, held_out if split == "train" else None)
                sets[item.prompt.set][fate] += 1
                if fate == "kept":
                    kept[split].append(item.prompt)
            counts[split] = {name: dict(count) for name, count in sets.items()}
            if sets and not kept[split]:
                raise InputError(
                    f"no prompt of {split} is left: {_counted(counts[split])}; list other files"
                )
        return kept, counts

    def _fate(self, item: _Read, held_out: HeldOut | None) -> str:
        if held_out is not None and held_out.leaks(item.own):
            return "leaking"
        return "too_long" if len(item.prompt.ids) > self._settings.longest else "kept"

    def _read_all(self, tokenizer: Tokenizer) -> dict[str, list[_Read]]:
        lines = {
            entry: read_lines(entry, self._paths[entry.path])
            for split in SPLITS
            for entry in getattr(self._settings, split)
            if not is_plain_text(entry)
        }
        bad = {line for read in lines.values() for line in read if isinstance(line, BadLine)}
        if bad:
            listed = "\n".join(f"  {line.where}: {line.error}" for line in sorted(bad, key=_place))
            raise InputError(f"{len(bad)} bad line(s) in the prompt files; mend these:\n{listed}")
        return {
            split: [
                item
                for entry in getattr(self._settings, split)
                for item in (
                    self._of_lines(entry.path, lines[entry], tokenizer)
                    if entry in lines
                    else self._of_text(entry.path, tokenizer)
                )
            ]
            for split in SPLITS
        }

    def _of_lines(
        self, name: str, lines: Sequence[Line | BadLine], tokenizer: Tokenizer
    ) -> Iterable[_Read]:
        for index, line in enumerate(lines):
            assert isinstance(line, Line)
            ids = encode(line, tokenizer)
            own = tokenizer.encode(line.own_text, add_special=False)
            # A blank text gives nothing away, but its one token is in every other.
            texts = [text for text in (line.own_text, *line.further) if text.strip()]
            if ids:
                prompt = PromptIds(set=name, index=index, ids=ids)
                hidden = [_spellings(text, tokenizer) for text in texts]
                yield _Read(prompt=prompt, own=own, hidden=hidden)

    def _of_text(self, name: str, tokenizer: Tokenizer) -> Iterable[_Read]:
        path = self._paths[name]
        assert path is not None
        before = tokenizer.encode("")
        tokens = tokenizer.encode(read_plain(path), add_special=False)
        cut = passages(tokens, self._settings.passage_tokens, before=before)
        for index, ids in enumerate(cut):
            own = ids[len(before) :]
            prompt = PromptIds(set=name, index=index, ids=ids, plain=True)
            yield _Read(prompt=prompt, own=own, hidden=[[own]])

    def _refuse_both(self) -> None:
        """The same lines in both splits would only be noticed as leaks."""
        for one in self._settings.train:
            for two in self._settings.held_out:
                if one.path == two.path and _meet(one, two):
                    raise InputError(
                        f"prompts {one} are to train and {two} to be held out; give each file to "
                        "one of them, or ids that differ"
                    )


def encode(line: Line, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt, by the chat template where there is one, as `LLM.encode` does."""
    prompt = line.prompt
    if not tokenizer.has_chat_template:
        contents = [message["content"] for message in prompt.messages or []]
        return tokenizer.encode("\n\n".join(contents) if prompt.prompt is None else prompt.prompt)
    if prompt.messages is not None:
        return tokenizer.apply_chat_template(prompt.messages)
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt.prompt or ""}])


def _spellings(text: str, tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(spelt, add_special=False) for spelt in (text, f" {text}")]


def write_prompts(directory: Path, prompts: dict[str, list[PromptIds]]) -> dict[str, str]:
    """Writes `train.safetensors` and `held_out.safetensors`; returns their SHA-256 by split."""
    digests = {}
    for split, chosen in prompts.items():
        sets = list(dict.fromkeys(prompt.set for prompt in chosen))
        data = save(
            {
                "ids": np.array([token for prompt in chosen for token in prompt.ids], np.uint32),
                "lengths": np.array([len(prompt.ids) for prompt in chosen], np.uint32),
                "indices": np.array([prompt.index for prompt in chosen], np.uint32),
                "sets": np.array([sets.index(prompt.set) for prompt in chosen], np.uint32),
                "plain": np.array([prompt.plain for prompt in chosen], np.uint8),
                "names": np.frombuffer(json.dumps(sets).encode(), np.uint8),
            }
        )
        write_atomic(directory / f"{split}.safetensors", data)
        digests[split] = hashlib.sha256(data).hexdigest()
    return digests


def read_prompts(directory: Path, split: str, sha256: str) -> list[PromptIds]:
    """What `write_prompts` wrote of a split.

    Raises:
      InputError: the file is gone or not the one that was written.
    """
    path = directory / f"{split}.safetensors"
    try:
        if sha256_of(path) != sha256:
            raise ValueError("its sha256 differs from the manifest's")
        arrays = load(read_bytes(path))
        names = json.loads(arrays["names"].tobytes())
        ends = np.cumsum(arrays["lengths"])
        parts = np.split(arrays["ids"], ends)[:-1]
        columns = zip(parts, arrays["sets"], arrays["indices"], arrays["plain"], strict=True)
        return [
            PromptIds(set=names[of], index=int(index), ids=ids.tolist(), plain=bool(plain))
            for ids, of, index, plain in columns
        ]
    except (InputError, ValueError, TypeError, LookupError, SafetensorError) as error:
        raise InputError(f"{path}: {brief(error)}; remove {directory} to make it again") from None


def report(counts: dict[str, Any]) -> str:
    """One line a split: what was kept and what was not, and why."""
    return "\n".join(f"{split}: {_counted(counts[split])}" for split in SPLITS if counts[split])


def _counted(sets: dict[str, dict[str, int]]) -> str:
    total = Counter()
    for count in sets.values():
        total.update(count)
    dropped = [
        f"{total[fate]} {text} left out"
        for fate, text in (
            ("leaking", "that share a span with held-out ones"),
            ("too_long", "that are too long"),
        )
        if total[fate]
    ]
    own = ", ".join(f"{name} {count['kept']}" for name, count in sets.items())
    return "; ".join([f"{total['kept']} prompts ({own})", *dropped])


def _meet(one: PromptEntry, two: PromptEntry) -> bool:
    if one.id_ranges is None or two.id_ranges is None:
        return True
    return any(
        max(a.start, b.start) < min(a.stop, b.stop) for a in one.id_ranges for b in two.id_ranges
    )


def _place(line: BadLine) -> tuple[str, int]:
    path, _, number = line.where.rpartition(":")
    return path, int(number)
