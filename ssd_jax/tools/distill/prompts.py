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

from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import good_lines, message_text
from ssd_jax.system.atomic import write_file
from ssd_jax.system.files import brief, read_bytes, sha256_of
from ssd_jax.tools.distill.magpie import SET, GeneratedTurn
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


def _has_words(text: str, phrase: str) -> bool:
    """Whether `phrase` occurs in a text with no ASCII word cut at its ends."""
    return re.search(rf"(?!\B\w){re.escape(phrase)}(?<!\w\B)", text, re.ASCII) is not None


class _Candidate(NamedTuple):
    """A prompt before the choice, with the tokens to compare.

    If it trains, `training_tokens` are what is learnt from; if it is held out, `hidden` are the
    texts that must not leak. `exclusion` says why it is left out, whatever its length.
    """

    prompt: PromptIds
    training_tokens: list[int]
    hidden: Sequence[list[int]] = ()
    exclusion: str = ""


class PromptFiles:
    """The files that the settings name, found and checked, but not read.

    Raises:
      InputError: a file that does not exist, or prompts that would be in both splits.
    """

    def __init__(self, settings: PromptSettings, directory: Path) -> None:
        self._longest, self._passage = settings.longest, settings.passage_tokens
        self._entries: dict[str, tuple[PromptEntry, ...]]
        self._entries = {split: getattr(settings, split) for split in SPLITS}
        self._all_entries = [*itertools.chain(*self._entries.values())]
        if reserved := {"target", "magpie"} & {entry.path for entry in self._all_entries}:
            raise InputError(f"prompts {min(reserved)}: a file cannot have that name; rename it")
        self._paths = {entry.path: find(entry, directory) for entry in self._all_entries}
        for a, b in itertools.product(*self._entries.values()):
            if self._same_file(a, b) and _overlap(a, b):  # would only be noticed as leaks
                raise InputError(
                    f"prompts {a} are to train and {b} to be held out; give each file to one "
                    "of them, or ids that differ"
                )
        for split, entries in self._entries.items():
            for a, b in itertools.combinations(entries, 2):
                if self._same_file(a, b) and (a.tasks is None) == (b.tasks is None):
                    raise InputError(
                        f"{split} lists one file as {a.path!r} and as {b.path!r}; put its ids "
                        "into one entry"
                    )

    def _same_file(self, a: PromptEntry, b: PromptEntry) -> bool:
        path_a, path_b = (self._paths[entry.path] for entry in (a, b))
        if path_a is None or path_b is None:
            return a.path == b.path
        return path_a.resolve() == path_b.resolve()

    def digests(self) -> dict[str, str]:
        """SHA-256 of every file, by its path in the configuration, and of the tasks' templates."""
        digests = {name: sha256_of(path) for name, path in self._paths.items() if path is not None}
        if any(entry.tasks for entry in self._all_entries):
            digests[TEMPLATES.name] = hashlib.sha256(TEMPLATES.read_bytes()).hexdigest()
        return digests

    def prepare(
        self, tokenizer: Tokenizer, turns: Sequence[GeneratedTurn] = ()
    ) -> tuple[dict[str, list[PromptIds]], dict[str, Any]]:
        """The prompts of each split, and counts by set of what was kept and left out.

        Args:
          turns: turns by the target, to train with besides the prompts of the files.

        Raises:
          InputError: lines that cannot be read (all are listed), or a split without prompts.
        """
        files = [entry for entry in self._all_entries if not entry.is_plain_text]
        lines = good_lines(read_lines(entry, self._paths[entry.path]) for entry in files)
        by_entry = dict(zip(files, lines, strict=True))
        candidates = {
            split: [item for entry in entries for item in self._read(entry, by_entry, tokenizer)]
            for split, entries in self._entries.items()
        }
        candidates["train"] += [
            _candidate(SET, index, Line.from_text(turn.text), tokenizer)._replace(
                exclusion=turn.exclusion
            )
            for index, turn in enumerate(turns)
        ]
        held_out = HeldOut(
            (text for item in candidates["held_out"] for text in item.hidden),
            tokenizer.decode,
        )
        prompts: dict[str, list[PromptIds]] = {split: [] for split in SPLITS}
        counts: dict[str, Any] = {}
        for split, entries in self._entries.items():
            sets = {entry.set: Counter(kept=0, too_long=0) for entry in entries}
            for item in candidates[split]:
                category = item.exclusion or (
                    "too_long" if len(item.prompt.ids) > self._longest else "kept"
                )
                if split == "train" and not item.exclusion and held_out.leaks(item.training_tokens):
                    category = "leaking"
                sets.setdefault(item.prompt.set, Counter(kept=0))[category] += 1
                if category == "kept":
                    prompts[split].append(item.prompt)
            counts[split] = {name: dict(count) for name, count in sets.items()}
            if sets and not prompts[split]:
                raise InputError(
                    f"no prompt of {split} is left: {_describe_sets(counts[split])}; "
                    "list other files"
                )
        return prompts, counts

    def _read(
        self, entry: PromptEntry, lines: dict[PromptEntry, list[Line]], tokenizer: Tokenizer
    ) -> list[_Candidate]:
        """The prompts that an entry takes from a file, without those that have no tokens."""
        if entry in lines:
            candidates = []
            for index, line in enumerate(lines[entry]):
                try:
                    candidates.append(_candidate(entry.set, index, line, tokenizer))
                except InputError as error:  # of the chat template
                    raise InputError(f"prompts {entry}: prompt {index + 1}: {error}") from None
        else:
            path = self._paths[entry.path]
            assert path is not None
            take = self._cut if entry.tasks is None else _tasks
            candidates = take(entry, read_plain(path), tokenizer)
        candidates = [item for item in candidates if item.prompt.ids]
        count = len(candidates) if entry.limit is None else min(entry.limit, len(candidates))
        return [
            candidates[i * len(candidates) // count]
            for i in range(count)
            for _ in range(entry.times)
        ]

    def _cut(self, entry: PromptEntry, text: str, tokenizer: Tokenizer) -> list[_Candidate]:
        start_ids = tokenizer.encode("")
        tokens = tokenizer.encode(text, add_special_tokens=False)
        candidates = []
        for index, ids in enumerate(passages(tokens, self._passage, prefix=start_ids)):
            body = ids[len(start_ids) :]
            prompt = PromptIds(set=entry.set, index=index, ids=ids, plain=True)
            candidates.append(_Candidate(prompt, body, [body]))
        return candidates


def _tasks(entry: PromptEntry, text: str, tokenizer: Tokenizer) -> list[_Candidate]:
    """Tasks over a text; their passages in its own spelling are compared, too."""
    assert entry.tasks is not None
    candidates = []
    for index, task in enumerate(make_tasks(text, entry.tasks, entry.path)):
        line = Line.from_text(task.prompt, kind=task.kind)
        item = _candidate(entry.set, index, line, tokenizer)
        passage = tokenizer.encode(task.passage, add_special_tokens=False)
        candidates.append(
            item._replace(
                training_tokens=item.training_tokens + passage, hidden=[*item.hidden, passage]
            )
        )
    return candidates


def _candidate(name: str, index: int, line: Line, tokenizer: Tokenizer) -> _Candidate:
    """A prompt that is asked of the target."""
    hidden = [
        tokenizer.encode(text, add_special_tokens=False)
        for text in (line.authored_text, *line.later_turns)
    ]
    prompt = PromptIds(set=name, index=index, ids=_encode(line, tokenizer), kind=line.kind)
    return _Candidate(
        prompt, tokenizer.encode(line.authored_text, add_special_tokens=False), hidden
    )


def _encode(line: Line, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt, by the chat template where there is one, as `LLM.encode` does."""
    messages = line.prompt.messages or [{"role": "user", "content": line.prompt.prompt}]
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokenizer.encode("\n\n".join(map(message_text, messages)))


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


def describe_counts(counts: dict[str, Any]) -> str:
    """One line a split: what was kept and what was not, and why."""
    return "\n".join(
        f"{split}: {_describe_sets(counts[split])}" for split in SPLITS if counts[split]
    )


_EXCLUSIONS = {
    "leaking": "that share a span with held-out ones",
    "too_long": "that are too long",
    "too_short": "that are too short",
    "broken": "that were cut off or are no text",
    "repeated": "that repeat others",
}


def _describe_sets(sets: dict[str, dict[str, int]]) -> str:
    total = sum(map(Counter, sets.values()), Counter())
    exclusions = [f"{total[f]} {text} left out" for f, text in _EXCLUSIONS.items() if total[f]]
    kept_by_set = ", ".join(f"{name} {count['kept']}" for name, count in sets.items())
    return "; ".join([f"{total['kept']} prompts ({kept_by_set})", *exclusions])


def _overlap(first: PromptEntry, second: PromptEntry) -> bool:
    if first.id_ranges is None or second.id_ranges is None:
        return True
    return any(
        max(a.start, b.start) < min(a.stop, b.stop)
        for a in first.id_ranges
        for b in second.id_ranges
    )
