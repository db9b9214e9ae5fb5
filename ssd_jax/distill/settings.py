"""Settings of a distillation: a TOML file of sections, each a frozen dataclass."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssd_jax.config import AUTO_BUDGETS, AUTO_K, MAX_BUDGET, MAX_K
from ssd_jax.distill.training.settings import DraftSettings, TrainSettings
from ssd_jax.errors import InputError
from ssd_jax.runtime.request import SamplingParams, check_types
from ssd_jax.speculation.fan_out import LEAST_BUDGET
from ssd_jax.toml_settings import check_names, read_toml

_RANGE = re.compile(r"\s*(\d+)(?:-(\d+))?\s*")


def parse_ranges(text: str, where: str) -> tuple[range, ...]:
    """The ranges of a text such as "1-10,511-974"; both ends belong to a range.

    Raises:
      InputError: no such text, or a range that ends before it begins; the message begins with
        `where`.
    """
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(end or match[1]) for end in match.groups()) if match else (1, 0)
        if last < first:
            raise InputError(
                f"{where}: {part.strip()!r} of {text!r} is no range; give ids such as 1-10,511-974"
            )
        ranges.append(range(first, last + 1))
    return tuple(ranges)


DTYPES = ("float32", "bfloat16")


def _free(default: Any) -> Any:
    """A field whose value does not change what is made, such as where things are."""
    return dataclasses.field(default=default, metadata={"free": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """Section [target]: the model to draft for.

    Attributes:
      source: see `Config.target`.
      name: of the default directory of results; None is the configuration's. Configurations that
        share it, and what they ask and generate, share the text.
      dtype: compute dtype of its forwards, "float32" or "bfloat16".
    """

    source: str = _free("")
    name: str | None = _free(None)
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_types(self)
        if not self.source:
            raise InputError("source is missing; give a path, hf:org/name, or pip:package==version")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype = {self.dtype!r} is unknown; one of {list(DTYPES)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptEntry:
    """A file of prompts, or a part of it.

    Attributes:
      path: a built-in set, or a file relative to the directory of the prompts.
      ids: which of its lines, such as 1-10,511-974; None is all.
    """

    path: str
    ids: str | None = None

    @classmethod
    def of(cls, item: object, name: str) -> PromptEntry:
        """From "PATH" or {path = "PATH", ids = "1-10"}; `name` is the list's, for messages."""
        if isinstance(item, str) and item:
            return cls(path=item)
        if isinstance(item, dict) and item.get("path") and {*item} <= {"path", "ids"}:
            entry = cls(**item)
            check_types(entry)
            if entry.ids is not None:
                parse_ranges(entry.ids, f"{name}: {entry.path}")
            return entry
        raise InputError(f'{name}: {item!r} is not understood; give "PATH" or {{path, ids}}')

    @property
    def id_ranges(self) -> tuple[range, ...] | None:
        """The ranges of `ids`."""
        return None if self.ids is None else parse_ranges(self.ids, self.path)

    def __str__(self) -> str:
        return self.path if self.ids is None else f"{self.path}[{self.ids}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Section [prompts]: what the target is asked, and what stays unseen.

    Attributes:
      train, held_out: files and built-in sets, see `PromptEntry.of`. Without any to train, drafts
        are only evaluated.
      directory: where files are, relative to the configuration file.
      longest: prompts of more tokens are left out.
      passage_tokens: tokens of a passage of a plain text file.
    """

    train: tuple[PromptEntry, ...] = ()
    held_out: tuple[PromptEntry, ...] = ()
    directory: str = _free(".")
    longest: int = 512
    passage_tokens: int = 128

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("train", "held_out"):
            items = getattr(self, name)
            if not isinstance(items, list | tuple) or not (items or name == "train"):
                raise InputError(f"{name} is empty; list at least one file of prompts")
            entries = tuple(
                x if isinstance(x, PromptEntry) else PromptEntry.of(x, name) for x in items
            )
            object.__setattr__(self, name, entries)
            paths = [entry.path for entry in entries]
            twice = [path for path in paths if paths.count(path) > 1]
            if twice:
                raise InputError(f"{name} lists {twice[0]!r} twice; put its ids into one entry")
        _at_least(self, longest=1, passage_tokens=2)
        if self.passage_tokens > self.longest:
            raise InputError(
                f"passage_tokens = {self.passage_tokens} is more than longest = {self.longest}; "
                "lower the one or raise the other"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Section [generate]: the target's own completions.

    Attributes:
      completions: how many in all; None is one of each prompt. More than there are prompts go
        through them again, with other temperatures and noise.
      max_tokens: of a completion.
      temperatures: taken in turn by each prompt, but 0 only once: it gives the same text again.
      seed: of the noise and of the order of prompts.
      slots: completions decoded together.
      shard_tokens: most tokens of a shard, prompts included; at least as many as all slots take.
      top_n: likeliest tokens that are kept of each of the target's distributions; 0 keeps none.
    """

    completions: int | None = None
    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    seed: int = 0
    slots: int = 16
    shard_tokens: int = 65536
    top_n: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        given = self.temperatures
        if not isinstance(given, list | tuple) or not given:
            raise InputError(f"temperatures = {given!r} must be a list of at least one number")
        for temperature in given:
            SamplingParams(temperature=temperature, seed=self.seed)
        object.__setattr__(self, "temperatures", tuple(map(float, given)))
        _at_least(self, completions=1, max_tokens=1, slots=1, shard_tokens=1, top_n=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Section [evaluate]: what a draft is judged by.

    Attributes:
      sets: of the held-out prompts, as `prompts.held_out` names them; empty is all.
      prompts: of each set, spread evenly over it; all where it has fewer.
      max_tokens: of a completion.
      seed: of the noise at temperature 1.
      ks: numbers of speculated tokens.
      budgets: numbers of branches.
      repeats: timed forwards of every width.
    """

    sets: tuple[str, ...] = ()
    prompts: int = 40
    max_tokens: int = 256
    seed: int = 0
    ks: tuple[int, ...] = _free(tuple(range(1, AUTO_K + 1)))
    budgets: tuple[int, ...] = _free(AUTO_BUDGETS)
    repeats: int = _free(20)

    def __post_init__(self) -> None:
        check_types(self)
        _at_least(self, prompts=1, max_tokens=2, seed=0, repeats=1)
        sets = self.sets
        if not isinstance(sets, list | tuple) or not all(isinstance(name, str) for name in sets):
            raise InputError(f"sets = {sets!r} must be a list of held-out sets")
        object.__setattr__(self, "sets", tuple(dict.fromkeys(sets)))
        for name, least, most in (("ks", 1, MAX_K), ("budgets", LEAST_BUDGET, MAX_BUDGET)):
            given = getattr(self, name)
            whole = isinstance(given, list | tuple) and all(type(n) is int for n in given)
            if not whole or not given or not all(least <= n <= most for n in given):
                raise InputError(f"{name} = {given!r} must list integers from {least} to {most}")
            object.__setattr__(self, name, tuple(sorted(set(given))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """Everything that a configuration file says.

    Attributes:
      name: of the file, without its ending.
      directory: where the prompt files are.
      draft, train: None where there is no such section; nothing is trained then.
      evaluate: None where there is no such section; nothing is evaluated then.
    """

    name: str
    directory: Path
    target: TargetSettings
    prompts: PromptSettings
    generate: GenerateSettings
    draft: DraftSettings | None = None
    train: TrainSettings | None = None
    evaluate: EvaluateSettings | None = None


_KINDS = {
    "target": TargetSettings,
    "prompts": PromptSettings,
    "generate": GenerateSettings,
    "draft": DraftSettings,
    "train": TrainSettings,
    "evaluate": EvaluateSettings,
}
_OPTIONAL = ("draft", "train", "evaluate")


def read_settings(path: Path, *, data: Path | None = None) -> DistillSettings:
    """Reads a configuration file.

    Args:
      path: the file.
      data: where the prompt files are, instead of what the file says.

    Raises:
      InputError: an unreadable file, or a bad section, key or value, with the section's name.
    """
    tables = read_toml(path, set(_KINDS))
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise InputError(f"config {path}: {name} must be a section, [{name}]")
    wanted = [name for name in _KINDS if name in tables or name not in _OPTIONAL]
    sections = {
        name: read_section(_KINDS[name], tables.get(name, {}), f"config {path}: [{name}]")
        for name in wanted
    }
    if len({"draft", "train"} & {*sections}) == 1:
        raise InputError(f"config {path}: [draft] and [train] go together; give both or neither")
    if not sections["prompts"].train and "train" in tables:
        raise InputError(
            f"config {path}: [prompts] train is empty; list at least one file of prompts, or leave "
            "[draft] and [train] out to evaluate drafts alone"
        )
    directory = path.parent / sections["prompts"].directory if data is None else data
    settings = DistillSettings(name=path.stem, directory=directory, **sections)
    _check_scores(settings, f"config {path}: ")
    _check_sets(settings, f"config {path}: ")
    return settings


def read_section(kind: type, table: Mapping[str, Any], where: str) -> Any:
    """A section as the dataclass `kind`, whose own errors get `where` before them.

    Raises:
      InputError: an unknown key (with the nearest known one), or a bad value.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    check_names(table, {*fields}, f"{where} ")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in table:
            raise InputError(f"{where} {name} is missing")
    try:
        return kind(**table)
    except InputError as error:
        raise InputError(f"{where} {error}") from None


def recorded(section: str, settings: Any) -> dict[str, Any]:
    """What a stage's results depend on: each key with its section's name, and its JSON value."""
    return {
        f"{section}.{field.name}": _plain(getattr(settings, field.name))
        for field in dataclasses.fields(settings)
        if not field.metadata.get("free")
    }


def _check_scores(settings: DistillSettings, where: str) -> None:
    """Refuses to generate without what the losses will need."""
    train = settings.train
    if train is None or settings.generate.top_n or train.probabilities == "live":
        return
    if train.kl or train.acceptance:
        raise InputError(
            f"{where}[generate] top_n = 0 keeps no probabilities, which kl and acceptance of "
            '[train] need; raise it, set probabilities = "live", or train on cross_entropy alone'
        )


def _check_sets(settings: DistillSettings, where: str) -> None:
    """Refuses to evaluate on what is not held out."""
    if settings.evaluate is None:
        return
    known = {entry.path for entry in settings.prompts.held_out}
    for name in settings.evaluate.sets:
        if name not in known:
            raise InputError(
                f"{where}[evaluate] sets: {name!r} is not held out; held_out of [prompts] lists "
                f"{', '.join(sorted(known))}"
            )
    longest = settings.evaluate.max_tokens - 2
    if max(settings.evaluate.ks) > longest:
        raise InputError(
            f"{where}[evaluate] max_tokens = {settings.evaluate.max_tokens} leaves no room for "
            f"ks = {list(settings.evaluate.ks)}; raise the one or lower the others"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PromptEntry) else value


def _at_least(settings: Any, **least: int) -> None:
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and value < bound:
            raise InputError(f"{name} = {value} must be at least {bound}")
