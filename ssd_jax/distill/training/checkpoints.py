"""Checkpoints of training: whole or absent, the last few kept.

  NAME/arrays/        an orbax checkpoint: the leaves of the state, by number
  NAME/manifest.json  step, what the run was made with, sizes of the files in arrays/

A checkpoint is written under another name and renamed when it is complete; one whose files are not
as long as its manifest says (a power cut) is passed over for the one before.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ssd_jax.errors import InputError
from ssd_jax.system.atomic import clear_partial, new_directory
from ssd_jax.system.files import read_json

_NAME = re.compile(r"step-(\d{8})")
_MANIFEST, _ARRAYS = "manifest.json", "arrays"


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint's contents; `state` has NumPy leaves."""

    step: int
    state: Any


class Checkpoints:
    """Checkpoints of one run in a directory.

    Args:
      directory: made if need be; what a killed run left half-written there is removed.
      made_with: JSON values that decide what is trained; a run with others cannot go on from here.
      keep: how many to keep.
    """

    def __init__(self, directory: Path, *, made_with: Mapping[str, Any], keep: int) -> None:
        self._directory = directory
        self._made_with = json.loads(json.dumps(made_with))
        self._keep = keep
        directory.mkdir(parents=True, exist_ok=True)
        clear_partial(directory)

    def steps(self) -> list[int]:
        """Steps of which there is a whole checkpoint, ascending."""
        found = [_NAME.fullmatch(path.name) for path in self._directory.iterdir()]
        steps = sorted(int(match[1]) for match in found if match)
        return [step for step in steps if self._manifest(step) is not None]

    def save(self, step: int, state: Any) -> None:
        """Writes the state after `step` steps, then removes the oldest ones and what is not whole.

        Raises:
          OSError: the disk is full; the checkpoints before are as they were.
        """
        import orbax.checkpoint as ocp

        leaves = {f"{i:05}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
        # One of that name is not whole, or the same.
        with new_directory(self._path(step), durable=True) as partial:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(partial.absolute() / _ARRAYS, args=ocp.args.PyTreeSave(leaves))
            manifest = {
                "step": step,
                "made_with": self._made_with,
                "files": _sizes(partial / _ARRAYS),
            }
            text = json.dumps(manifest, indent=1) + "\n"
            (partial / _MANIFEST).write_text(text, encoding="utf-8")
        kept = self.steps()[-self._keep :]
        for path in self._directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and int(match[1]) not in kept:  # old, or not whole
                shutil.rmtree(path)

    def restore(self, like: Any) -> Restored | None:
        """The latest whole checkpoint; None if there is none.

        Args:
          like: a state of the same structure.

        Raises:
          InputError: it was made with other settings, which are named, or it is damaged.
        """
        steps = self.steps()
        if not steps:
            return None
        manifest = self._manifest(steps[-1])
        assert manifest is not None
        self._require_same(manifest["made_with"])
        arrays = self._read(self._path(steps[-1]))
        structs, structure = jax.tree.flatten(like)
        leaves = [arrays.get(f"{i:05}") for i in range(len(structs))]
        fit = len(arrays) == len(structs) and all(
            leaf is not None and (leaf.shape, leaf.dtype) == (struct.shape, struct.dtype)
            for leaf, struct in zip(leaves, structs, strict=True)
        )
        if not fit:
            raise InputError(
                f"{self._path(steps[-1])} is the state of another draft or optimiser; remove it, "
                "or give another --out"
            )
        return Restored(steps[-1], jax.tree.unflatten(structure, leaves))

    def _read(self, path: Path) -> dict[str, np.ndarray]:
        import orbax.checkpoint as ocp

        try:
            handler = ocp.PyTreeCheckpointHandler()
            with ocp.Checkpointer(handler) as checkpointer:
                stored = checkpointer.metadata(path.absolute() / _ARRAYS)
                tree = stored.item_metadata.tree
                numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
                return checkpointer.restore(
                    path.absolute() / _ARRAYS, args=ocp.args.PyTreeRestore(restore_args=numpy)
                )
        except (ValueError, KeyError, OSError) as error:
            raise InputError(
                f"{path} is damaged: {error}; remove it, training goes on from the one before"
            ) from None

    def _require_same(self, before: Mapping[str, Any]) -> None:
        now = self._made_with
        changed = sorted(
            key for key in before.keys() | now.keys() if before.get(key) != now.get(key)
        )
        if changed:
            listed = "; ".join(
                f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in changed
            )
            raise InputError(
                f"{self._directory}: training cannot go on with other settings: {listed}; undo "
                "the change, remove that directory to begin again, or give another --out"
            )

    def _manifest(self, step: int) -> dict[str, Any] | None:
        """None if the checkpoint is not whole."""
        path = self._path(step)
        try:
            manifest = read_json(path / _MANIFEST)
            whole = manifest["step"] == step and manifest["files"] == _sizes(path / _ARRAYS)
        except (InputError, KeyError):
            return None
        return manifest if whole else None

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:08}"


def _sizes(directory: Path) -> dict[str, int]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
