"""Stage *prompts*: token ids of the training and the held-out prompts, apart from each other.

The split is by file: prompts listed as held out never train, nor do training prompts that leak one
(`leaks`). Only what the sets' authors wrote is compared: a chat template and a system message are
the same in every prompt.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import good_lines, message_text
from ssd_jax.system.files import sha256_of
from ssd_jax.tools.distill.leaks import HeldOut
from ssd_jax.tools.distill.magpie import SET, GeneratedTurn
from ssd_jax.tools.distill.prompt_ids import PromptIds
from ssd_jax.tools.distill.prompt_settings import SPLITS, PromptEntry, PromptSettings
from ssd_jax.tools.distill.reading import Line, find, passages, read_lines, read_plain
from ssd_jax.tools.distill.tasks import TEMPLATES, make_tasks


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
