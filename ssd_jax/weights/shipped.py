"""Drafts that come with the package: `--draft=default` is the one for the given target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ssd_jax.errors import InputError
from ssd_jax.weights.draft_checkpoint import CONFIG, KEY, TENSORS, Target, identity_of

DEFAULT = "default"
"""Instead of a draft's source: the one that comes with the package."""

DIRECTORY = Path(__file__).parents[1] / "drafts"
"""Where they are; each has a model card, README.md."""


class ShippedDraft(NamedTuple):
    """A draft checkpoint of the package.

    Attributes:
      path: its directory.
      target: the source of the target it was made for.
      sha256: that target's digest, see `draft_checkpoint.identity_of`.
      tied: its tensor name -> the target's.
      bytes: of its own tensors.
    """

    path: Path
    target: str
    sha256: str
    tied: dict[str, str]
    bytes: int


def shipped_drafts() -> list[ShippedDraft]:
    """All of them, the smallest first."""
    found = [_read(path.parent) for path in DIRECTORY.glob(f"*/{CONFIG}")]
    return sorted(found, key=lambda draft: (draft.bytes, draft.path))


def default_draft(target: Target, mode: str) -> Path:
    """The draft that comes with the package for a target.

    Of several, mode sd takes the smallest, for its drafting takes time of its own, and every other
    mode the largest, which is the best and whose drafting SSD hides.

    Args:
      target: opened.
      mode: "sd", or another one.

    Raises:
      InputError: there is none for this target.
    """
    drafts = shipped_drafts()
    tensors = target.checkpoint.tensors.names()
    fitting = [
        draft
        for draft in drafts
        if tensors.issuperset(draft.tied.values())
        and identity_of(target, draft.tied).sha256 == draft.sha256
    ]
    if fitting:
        return fitting[0 if mode == "sd" else -1].path
    targets = ", ".join(sorted({draft.target for draft in drafts})) or "no target"
    raise InputError(
        f"draft = {DEFAULT!r}: no draft comes with ssd_jax for {target.checkpoint.source}, only "
        f"for {targets}; name a draft's source, use ngram, or make one with `ssd-jax distill`"
    )


def _read(path: Path) -> ShippedDraft:
    about: dict[str, Any] = json.loads((path / CONFIG).read_text(encoding="utf-8"))[KEY]
    return ShippedDraft(
        path=path,
        target=about["target"]["source"],
        sha256=about["target"]["sha256"],
        tied=about["tied"],
        bytes=(path / TENSORS).stat().st_size,
    )
