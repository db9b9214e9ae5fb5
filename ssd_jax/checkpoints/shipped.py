"""Drafts that come with the package: `--draft=default` is the one for the given target."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.draft_checkpoint import CONFIG, KEY, TENSORS, DraftOrigin, identity_of
from ssd_jax.errors import InputError
from ssd_jax.system.files import read_json

DEFAULT = "default"
"""Instead of a draft's source: the one that comes with the package."""

DIRECTORY = Path(__file__).parents[1] / "drafts"
"""Where they are; each has a model card, README.md."""


class ShippedDraft(NamedTuple):
    """A draft checkpoint of the package.

    Attributes:
      path: its directory.
      origin: its target, and what it takes from it.
      shape: width and vocabulary, which are the target's.
      bytes: of its own tensors.
    """

    path: Path
    origin: DraftOrigin
    shape: tuple[int, int]
    bytes: int


def shipped_drafts() -> list[ShippedDraft]:
    """All of them, the smallest first.

    Raises:
      InputError: one is damaged.
    """
    places = [path.parent for path in DIRECTORY.glob(f"*/{CONFIG}")]
    found = [_read(place) for place in places if not place.name.startswith(".")]
    return sorted(found, key=lambda draft: (draft.bytes, draft.path))


def _read(path: Path) -> ShippedDraft:
    try:
        config = read_json(path / CONFIG)
        return ShippedDraft(
            path=path,
            origin=DraftOrigin.parse(config[KEY], str(path / CONFIG)),
            shape=(config["hidden_size"], config["vocab_size"]),
            bytes=(path / TENSORS).stat().st_size,
        )
    except (InputError, OSError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is no draft ({type(error).__name__}: {error}); install ssd_jax again, or "
            "remove that directory"
        ) from None


def find_draft(target: Checkpoint, mode: str) -> Path | None:
    """The draft that comes with the package for a target, if there is one.

    Of several, mode sd takes the smallest, for its drafting takes time of its own, and every other
    mode the largest, which is the best and whose drafting SSD hides. The target's tensors are read
    only where its shape is a draft's.

    Raises:
      InputError: a draft of the package is damaged.
    """
    config, names = target.config, target.tensors.names()
    digests: dict[frozenset[str], str] = {}
    fitting = []
    for draft in shipped_drafts():
        tied = frozenset(draft.origin.tied.values())
        if draft.shape != (config.hidden_size, config.vocab_size) or not tied <= names:
            continue
        if tied not in digests:
            digests[tied] = identity_of(target, draft.origin.tied).sha256
        if digests[tied] == draft.origin.target.sha256:
            fitting.append(draft.path)
    return fitting[0 if mode == "sd" else -1] if fitting else None


def default_draft(target: Checkpoint, mode: str) -> Path:
    """See `find_draft`.

    Raises:
      InputError: there is none for this target, or one is damaged.
    """
    found = find_draft(target, mode)
    if found is not None:
        return found
    targets = ", ".join(sorted({draft.origin.target.source for draft in shipped_drafts()}))
    there = f"yet, for {target.source} or any other target"
    if targets:
        there = f"for {target.source}, only for {targets}"
    raise InputError(
        f"draft = {DEFAULT!r}: no draft comes with ssd_jax {there}; name a draft's source, use "
        "ngram, or make a draft with `ssd-jax distill`"
    )
