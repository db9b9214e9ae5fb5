"""What a stage has made, from what, and with which settings: `manifest.json` in its directory."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.system.atomic import write_file
from ssd_jax.system.files import read_json, sha256_of, shown

MANIFEST = "manifest.json"
_FORMAT = 1
_KINDS = {"stage": str, "settings": dict, "inputs": dict, "finished": bool, "data": dict}
_INPUTS = {
    "target": "the target",
    "magpie": "the output of stage magpie",
    "prompts": "the output of stage prompts",
    "generate": "the output of stage generate",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The state of one stage.

    Attributes:
      settings: JSON values by "section.key".
      inputs: digests of what it was made from, by name; "target" is the target's.
      data: what it records of its files.
    """

    stage: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    finished: bool = False
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a stage's directory; None where none was written.

    Raises:
      InputError: damaged, or of another format.
    """
    path = directory / MANIFEST
    if not path.exists():
        return None
    remedy = f"remove {directory} to make it again"
    value = read_json(path, remedy=remedy)
    if value.get("format") != _FORMAT:
        raise InputError(
            f"{path}: format {shown(value.get('format'))} is not supported, this version reads "
            f"{_FORMAT}; {remedy}"
        )
    unusable = [name for name, kind in _KINDS.items() if not isinstance(value.get(name), kind)]
    if unusable:
        raise InputError(f"{path} is damaged: no usable {', '.join(unusable)} in it; {remedy}")
    return Manifest(**{name: value[name] for name in _KINDS})


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes the manifest; the old one stays until the new one is whole."""
    value = {"format": _FORMAT, **dataclasses.asdict(manifest)}
    data = (json.dumps(value, indent=1) + "\n").encode()
    write_file(directory / MANIFEST, data, durable=True)


def check_same(directory: Path, old: Manifest, new: Manifest) -> None:
    """Refuses to continue a stage with other settings or inputs than it was begun with.

    Inputs that `new` does not name are taken to be the same.

    Raises:
      InputError: what changed, from what to what, and what to do.
    """
    changes = [
        f"{key} is {_json(new_value)}, was {_json(old_value)}"
        for key, new_value, old_value in differences(old.settings, new.settings)
    ]
    changes += [
        f"{_INPUTS.get(name, name)} has sha256 {new_value}, was {old_value}"
        for name, new_value, old_value in differences(old.inputs, {**old.inputs, **new.inputs})
    ]
    if changes:
        lines = "\n".join(f"  {line}" for line in changes)
        raise InputError(
            f"stage {old.stage} in {directory} was begun with other settings:\n{lines}\n"
            f"change them back, give another --out, or remove {directory} to make it again"
        )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, new value, old value) where they differ; None stands for a missing one."""
    values = [(name, new.get(name), old.get(name)) for name in sorted({*old, *new})]
    return [
        (name, new_value, old_value)
        for name, new_value, old_value in values
        if new_value != old_value
    ]


def _json(value: Any) -> str:
    return "absent" if value is None else json.dumps(value)


def file_digests(directory: Path) -> dict[str, str]:
    """SHA-256 of each file of a directory, by name; empty where there is no directory."""
    files = sorted(path for path in directory.glob("*") if path.is_file())
    return {path.name: sha256_of(path) for path in files}


@contextlib.contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Keeps other processes out of a directory while this one works in it.

    Raises:
      InputError: another one is at work there.
    """
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another ssd-jax distill is at work in {directory}; wait for it, or give "
                "another --out"
            ) from None
        yield
