"""Checkpoints of training, by orbax's `CheckpointManager`: whole or absent, the last few kept.

Each has two items: `state`, the leaves of the state by number, and `made_with`, what the run was
made with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ssd_jax.errors import InputError, SsdError
from ssd_jax.system.files import brief
from ssd_jax.tools.distill.manifest import differences


class RestoredState(NamedTuple):
    """A checkpoint's contents; `state` has NumPy leaves."""

    step: int
    state: Any


class Checkpoints:
    """Checkpoints of one run in a directory.

    Args:
      directory: made if needed; what a killed run left half-written there is removed.
      made_with: JSON values that decide what is trained; a run with others cannot continue here.

    Raises:
      InputError: checkpoints of an earlier version are there.
    """

    def __init__(self, directory: Path, *, made_with: Mapping[str, Any], keep: int) -> None:
        import orbax.checkpoint as ocp

        if any(directory.glob("step-*")):
            raise InputError(
                f"{directory} has checkpoints of an earlier version of ssd_jax, which this one "
                "cannot read; go on with that version, or remove that directory to begin again"
            )
        self._directory = directory
        self._made_with = made_with
        self._items = ocp.args
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                step_prefix="step",
                cleanup_tmp_directories=True,
                enable_async_checkpointing=False,
            ),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "made_with": ocp.JsonCheckpointHandler(),
            },
        )

    def save(self, step: int, state: Any) -> None:
        """Writes the state after `step` steps, then removes the oldest ones.

        Raises:
          SsdError: the disk is full; earlier checkpoints are as they were.
        """
        for newer_step in self._manager.all_steps():
            if newer_step >= step:  # unreadable, or training would not be here again
                self._manager.delete(newer_step)
        leaves = {f"{i:05}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
        items = self._items.Composite(
            state=self._items.StandardSave(leaves), made_with=self._items.JsonSave(self._made_with)
        )
        try:
            self._manager.save(step, args=items, force=True)
        except (OSError, ValueError) as error:  # tensorstore raises the latter
            raise SsdError(
                f"{self._directory}: step_{step} cannot be written: {brief(error, end=True)}; make "
                "room there: the same command goes on from the checkpoint before"
            ) from error

    def restore(self, like: Any) -> RestoredState | None:
        """The latest checkpoint that can be read; None if there is none.

        Args:
          like: a state of the same structure.

        Raises:
          InputError: it was made with other settings, which are named, it is another draft's, or
            all checkpoints are damaged.
        """
        damage = ""
        items = self._items.Composite(
            made_with=self._items.JsonRestore(), state=self._items.StandardRestore()
        )
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                restored = self._manager.restore(step, args=items)
                arrays = restored["state"]
                changes = differences(restored["made_with"], self._made_with)
            except (ValueError, LookupError, TypeError, OSError) as error:
                damage = damage or f"step_{step} is damaged: {brief(error)}"
                continue
            if changes:
                lines = "; ".join(f"{key} was {old!r}, is {new!r}" for key, new, old in changes)
                raise InputError(
                    f"{self._directory}: training cannot go on with other settings: {lines}; undo "
                    "the change, remove that directory to begin again, or give another --out"
                )
            structs, structure = jax.tree.flatten(like)
            leaves = [arrays[name] for name in sorted(arrays)]
            if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in structs]:
                raise InputError(
                    f"{self._directory} has the state of another draft or optimiser; remove it, "
                    "or give another --out"
                )
            return RestoredState(step, jax.tree.unflatten(structure, leaves))
        if damage:
            raise InputError(
                f"{self._directory} has no checkpoint that can be read: {damage}; remove that "
                "directory to begin again"
            )
        return None
