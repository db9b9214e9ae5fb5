"""The files of a directory that hold chat templates, one or several by name, as transformers has
them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssd_jax.checkpoints.chat.template import DEFAULT
from ssd_jax.errors import InputError
from ssd_jax.system.files import is_unicode, read_json, read_text, require_plain_name, shown

_DEFAULT_FILE, _FOLDER, _SUFFIX = "chat_template.jinja", "additional_chat_templates", ".jinja"
_OF_IMAGES = "chat_template.json"
"""Where models that see images may have it."""
_MAX_TEMPLATE = 1 << 20


def read_templates(path: Path, config: Mapping[str, Any]) -> str | Mapping[str, str] | None:
    """The Jinja source of a directory's chat template, or sources by name.

    Files with templates, `chat_template.jinja` and those in `additional_chat_templates`, take the
    place of all that `config` has, and this that of `chat_template.json`.

    Args:
      config: the content of tokenizer_config.json.

    Raises:
      InputError: a file or the key `chat_template` cannot be understood.
    """
    default = path / _DEFAULT_FILE
    files = {file.stem: file for file in sorted((path / _FOLDER).glob(f"*{_SUFFIX}"))}
    if default.exists():
        files[DEFAULT] = default
    if files:
        sources = {name: read_text(file, max_bytes=_MAX_TEMPLATE) for name, file in files.items()}
        return named(sources, path / _FOLDER)
    file, value = path / "tokenizer_config.json", config.get("chat_template")
    if value is None and (path / _OF_IMAGES).exists():
        file = path / _OF_IMAGES
        value = read_json(file).get("chat_template")
    return _of_config(file, value)


def write_templates(templates: str | Mapping[str, str] | None, directory: Path) -> None:
    """Writes the files that `read_templates` reads back."""
    by_name = {DEFAULT: templates} if isinstance(templates, str) else templates or {}
    for name, source in by_name.items():
        file = directory / _DEFAULT_FILE
        if name != DEFAULT:
            file = directory / _FOLDER / f"{name}{_SUFFIX}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source, encoding="utf-8", newline="")


def named(templates: Mapping[str, str], where: Path) -> str | Mapping[str, str]:
    """Sources by name; the source alone if there is only the default.

    Raises:
      InputError: a name, given by the file `where`, is no name of a file.
    """
    for name in templates:
        require_plain_name(name, where)
    return templates[DEFAULT] if templates.keys() == {DEFAULT} else templates


def _of_config(file: Path, value: object) -> str | Mapping[str, str] | None:
    if value is None:
        return None
    entries = [{"name": DEFAULT, "template": value}] if isinstance(value, str) else value
    if isinstance(entries, list) and entries and all(map(_is_template, entries)):
        return named({entry["name"]: entry["template"] for entry in entries}, file)
    raise InputError(
        f"{file}: chat_template must be a string or a list of objects with 'name' and 'template', "
        f"of Unicode text, not {shown(value)}; fetch the file again"
    )


def _is_template(entry: object) -> bool:
    if not isinstance(entry, Mapping):
        return False
    values = entry.get("name"), entry.get("template")
    return all(isinstance(value, str) and is_unicode(value) for value in values)
