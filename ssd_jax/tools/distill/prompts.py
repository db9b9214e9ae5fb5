"""Stage *prompts*: token ids of the training and the held-out prompts, apart from each other.

The split is by file: prompts listed as held out never train, nor do training prompts that leak one.
A prompt leaks if it shares `SPAN` consecutive tokens with a held-out text, or contains the whole of
a held-out text of at most `SPAN` tokens. Only what the sets' authors wrote is compared: a chat
template and a system message are the same in every prompt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ssd_jax.checkpoints.tokenizer import Tokenizer
from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import good_lines, message_text
from ssd_jax.system.atomic import write_file
from ssd_jax.system.files import brief, read_bytes, sha256_of
from ssd_jax.tools.distill.magpie import SET, Written
from ssd_jax.tools.distill.prompt_settings import SPLITS, PromptEntry, PromptSettings
from ssd_jax.tools.distill.reading import Line, find, passages, read_lines, read_plain
from ssd_jax.tools.distill.tasks import TEMPLATES, make_tasks

SPAN = 13
"""Tokens."""


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


class HeldOut:
    """Recognises held-out texts: long ones by their spans, short ones as text.

    The first and last tokens of a short one may differ with the text around it.

    Args:
      texts: in tokens.
      decode: gives the text of tokens.
    """

    def __init__(
        self, texts: Iterable[Sequence[int]], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._decode = decode
        self._spans: set[bytes] = set()
        self._short: set[str] = set()
        for tokens in texts:
            if len(tokens) > SPAN:
                self._spans.update(_spans(tokens))
            elif text := decode(tokens).strip():
                self._short.add(text)

    def leaks(self, tokens: Sequence[int]) -> bool:
        """Whether a training text of these tokens must not be used."""
        if not self._spans.isdisjoint(_spans(tokens)):
            return True
        text = self._decode(tokens) if self._short else ""
        return any(short in text and _has_words(text, short) for short in self._short)


def _spans(tokens: Sequence[int]) -> Iterator[bytes]:
    data, size = np.asarray(tokens, np.int32).tobytes(), 4 * SPAN
    return (data[begin : begin + size] for begin in range(0, len(data) - size + 1, 4))


def _has_words(text: str, part: str) -> bool:
    """Whether `part` occurs in a text with no ASCII word cut at its ends."""
    return re.search(rf"(?!\B\w){re.escape(part)}(?<!\w\B)", text, re.ASCII) is not None


class _Candidate(NamedTuple):
    """A prompt before the choice, with the tokens to compare.

    If it trains, `own` are the tokens that are learnt from; if it is held out, `hidden` are the
    texts that must not leak. `fate` says why it is left out, whatever its length.
    """

    prompt: PromptIds
    own: list[int]
    hidden: Sequence[list[int]] = ()
    fate: str = ""


class PromptFiles:
    """The files that the settings name, found and checked, but not read.

    Raises:
      InputError: a file that does not exist, or prompts that would be in both splits.
    """

    def __init__(self, settings: PromptSettings, directory: Path) -> None:
        self._longest, self._passage = settings.longest, settings.passage_tokens
        self._entries: dict[str, tuple[PromptEntry, ...]]
        self._entries = {split: getattr(settings, split) for split in SPLITS}
        self._every = [*itertools.chain(*self._entries.values())]
        if taken := {"target", "magpie"} & {entry.path for entry in self._every}:
            raise InputError(f"prompts {min(taken)}: a file cannot have that name; rename it")
        self._paths = {entry.path: find(entry, directory) for entry in self._every}
        for one, two in itertools.product(*self._entries.values()):
            if self._same_file(one, two) and _meet(one, two):  # would only be noticed as leaks
                raise InputError(
                    f"prompts {one} are to train and {two} to be held out; give each file to one "
                    "of them, or ids that differ"
                )
        for split, entries in self._entries.items():
            for one, two in itertools.combinations(entries, 2):
                if self._same_file(one, two) and (one.tasks is None) == (two.tasks is None):
                    raise InputError(
                        f"{split} lists one file as {one.path!r} and as {two.path!r}; put its ids "
                        "into one entry"
                    )

    def _same_file(self, one: PromptEntry, two: PromptEntry) -> bool:
        own, other = (self._paths[each.path] for each in (one, two))
        if own is None or other is None:
            return one.path == two.path
        return own.resolve() == other.resolve()

    def digests(self) -> dict[str, str]:
        """SHA-256 of every file, by its path in the configuration, and of the tasks' templates."""
        digests = {name: sha256_of(path) for name, path in self._paths.items() if path is not None}
        if any(entry.tasks for entry in self._every):
            digests[TEMPLATES.name] = hashlib.sha256(TEMPLATES.read_bytes()).hexdigest()
        return digests

    def prepare(
        self, tokenizer: Tokenizer, written: Sequence[Written] = ()
    ) -> tuple[dict[str, list[PromptIds]], dict[str, Any]]:
        """The prompts of each split, and counts by set of what was kept and left out.

        Args:
          written: turns by the target, to train with besides the prompts of the files.

        Raises:
          InputError: lines that cannot be read (all are listed), or a split without prompts.
        """
        files = [entry for entry in self._every if not entry.is_plain_text]
        lines = good_lines(read_lines(entry, self._paths[entry.path]) for entry in files)
        by_entry = dict(zip(files, lines, strict=True))
        read = {
            split: [item for entry in entries for item in self._read(entry, by_entry, tokenizer)]
            for split, entries in self._entries.items()
        }
        read["train"] += [
            _asked(SET, index, Line.of(turn.text), tokenizer)._replace(fate=turn.fate)
            for index, turn in enumerate(written)
        ]
        held_out = HeldOut(
            (text for item in read["held_out"] for text in item.hidden),
            tokenizer.decode,
        )
        kept: dict[str, list[PromptIds]] = {split: [] for split in SPLITS}
        counts: dict[str, Any] = {}
        for split, entries in self._entries.items():
            sets = {entry.set: Counter(kept=0, too_long=0) for entry in entries}
            for item in read[split]:
                fate = item.fate or ("too_long" if len(item.prompt.ids) > self._longest else "kept")
                if split == "train" and not item.fate and held_out.leaks(item.own):
                    fate = "leaking"
                sets.setdefault(item.prompt.set, Counter(kept=0))[fate] += 1
                if fate == "kept":
                    kept[split].append(item.prompt)
            counts[split] = {name: dict(count) for name, count in sets.items()}
            if sets and not kept[split]:
                raise InputError(
                    f"no prompt of {split} is left: {_counted(counts[split])}; list other files"
                )
        return kept, counts

    def _read(
        self, entry: PromptEntry, lines: dict[PromptEntry, list[Line]], tokenizer: Tokenizer
    ) -> list[_Candidate]:
        """The prompts that an entry takes from a file, without those that have no tokens."""
        if entry in lines:
            read = []
            for index, line in enumerate(lines[entry]):
                try:
                    read.append(_asked(entry.set, index, line, tokenizer))
                except InputError as error:  # of the chat template
                    raise InputError(f"prompts {entry}: prompt {index + 1}: {error}") from None
        else:
            path = self._paths[entry.path]
            assert path is not None
            take = self._cut if entry.tasks is None else _tasks
            read = take(entry, read_plain(path), tokenizer)
        read = [item for item in read if item.prompt.ids]
        count = len(read) if entry.limit is None else min(entry.limit, len(read))
        return [read[i * len(read) // count] for i in range(count) for _ in range(entry.times)]

    def _cut(self, entry: PromptEntry, text: str, tokenizer: Tokenizer) -> list[_Candidate]:
        before = tokenizer.encode("")
        tokens = tokenizer.encode(text, add_special_tokens=False)
        read = []
        for index, ids in enumerate(passages(tokens, self._passage, before=before)):
            own = ids[len(before) :]
            prompt = PromptIds(set=entry.set, index=index, ids=ids, plain=True)
            read.append(_Candidate(prompt, own, [own]))
        return read


def _tasks(entry: PromptEntry, text: str, tokenizer: Tokenizer) -> list[_Candidate]:
    """Tasks over a text; their passages in its own spelling are compared, too."""
    assert entry.tasks is not None
    read = []
    for index, task in enumerate(make_tasks(text, entry.tasks, entry.path)):
        line = Line.of(task.prompt, kind=task.kind)
        item = _asked(entry.set, index, line, tokenizer)
        passage = tokenizer.encode(task.passage, add_special_tokens=False)
        read.append(item._replace(own=item.own + passage, hidden=[*item.hidden, passage]))
    return read


def _asked(name: str, index: int, line: Line, tokenizer: Tokenizer) -> _Candidate:
    """A prompt that is asked of the target."""
    hidden = [
        tokenizer.encode(text, add_special_tokens=False) for text in (line.own_text, *line.further)
    ]
    prompt = PromptIds(set=name, index=index, ids=_encode(line, tokenizer), kind=line.kind)
    return _Candidate(prompt, tokenizer.encode(line.own_text, add_special_tokens=False), hidden)


def _encode(line: Line, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt, by the chat template where there is one, as `LLM.encode` does."""
    messages = line.prompt.messages or [{"role": "user", "content": line.prompt.prompt}]
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokenizer.encode("\n\n".join(map(message_text, messages)))


def write_prompts(directory: Path, prompts: dict[str, list[PromptIds]]) -> dict[str, str]:
    """Writes `train.safetensors` and `held_out.safetensors`; returns their SHA-256 by split."""
    digests = {}
    for split, chosen in prompts.items():
        sets = list(dict.fromkeys(prompt.set for prompt in chosen))
        kinds = list(dict.fromkeys(prompt.kind for prompt in chosen))
        data = save(
            {
                "ids": np.array([token for prompt in chosen for token in prompt.ids], np.uint32),
                "lengths": np.array([len(prompt.ids) for prompt in chosen], np.uint32),
                "indices": np.array([prompt.index for prompt in chosen], np.uint32),
                "sets": np.array([sets.index(prompt.set) for prompt in chosen], np.uint32),
                "kinds": np.array([kinds.index(prompt.kind) for prompt in chosen], np.uint32),
                "plain": np.array([prompt.plain for prompt in chosen], np.uint8),
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
        parts = np.split(arrays["ids"], np.cumsum(arrays["lengths"]))[:-1]
        columns = (arrays[name] for name in ("sets", "kinds", "indices", "plain"))
        return [
            PromptIds(
                set=sets[of],
                index=int(index),
                ids=ids.tolist(),
                kind=kinds[kind],
                plain=bool(plain),
            )
            for ids, of, kind, index, plain in zip(parts, *columns, strict=True)
        ]
    except (InputError, ValueError, TypeError, LookupError, SafetensorError) as error:
        raise InputError(f"{path}: {brief(error)}; remove {directory} to make it again") from None


def report(counts: dict[str, Any]) -> str:
    """One line a split: what was kept and what was not, and why."""
    return "\n".join(f"{split}: {_counted(counts[split])}" for split in SPLITS if counts[split])


_FATES = {
    "leaking": "that share a span with held-out ones",
    "too_long": "that are too long",
    "too_short": "that are too short",
    "broken": "that were cut off or are no text",
    "repeated": "that repeat others",
}


def _counted(sets: dict[str, dict[str, int]]) -> str:
    total = sum(map(Counter, sets.values()), Counter())
    dropped = [f"{total[f]} {text} left out" for f, text in _FATES.items() if total[f]]
    own = ", ".join(f"{name} {count['kept']}" for name, count in sets.items())
    return "; ".join([f"{total['kept']} prompts ({own})", *dropped])


def _meet(one: PromptEntry, two: PromptEntry) -> bool:
    if one.id_ranges is None or two.id_ranges is None:
        return True
    return any(
        max(a.start, b.start) < min(a.stop, b.stop) for a in one.id_ranges for b in two.id_ranges
    )
