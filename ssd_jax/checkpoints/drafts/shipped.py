"""Drafts that come with the package: `--draft=default` is the one for the given target."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.drafts.checkpoint import CONFIG, KEY, TENSORS, DraftOrigin, identity_of
from ssd_jax.errors import InputError
from ssd_jax.system.files import nearest, read_json
from ssd_jax.system.paths import user_path

DEFAULT = "default"
"""Stands for the draft that comes with the package, instead of a source."""

DIRECTORY = Path(__file__).parents[2] / "drafts"
"""Directory of the drafts; each has a model card, README.md."""


class ShippedDraft(NamedTuple):
    """A draft checkpoint of the package.

    Attributes:
      path: directory of the draft.
      origin: its target, and what it takes from it.
      shape: width and vocabulary, which are the target's.
      bytes: bytes of its own tensors.
    """

    path: Path
    origin: DraftOrigin
    shape: tuple[int, int]
    bytes: int


def shipped_drafts() -> list[ShippedDraft]:
    """All drafts of the package, smallest first.

    Raises:
      InputError: one is damaged.
    """
    return sorted(map(_read, _directories()), key=lambda draft: (draft.bytes, draft.path))


def _directories() -> list[Path]:
    directories = [path.parent for path in DIRECTORY.glob(f"*/{CONFIG}")]
    return [directory for directory in directories if not directory.name.startswith(".")]


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


def find_draft(target: Checkpoint) -> Path | None:
    """The draft that comes with the package for a target, if there is one: the smallest of several.

    SD pays for the time of drafting, and a larger draft leaves SSD no time for branches. The
    target's tensors are read only if its shape is a draft's.

    Raises:
      InputError: a draft of the package is damaged.
    """
    config, names = target.config, target.tensors.shapes.keys()
    for draft in shipped_drafts():
        tied = draft.origin.tied
        if draft.shape != (config.hidden_size, config.vocab_size) or not {*tied.values()} <= names:
            continue
        if identity_of(target, tied).sha256 == draft.origin.target.sha256:
            return draft.path
    return None


def draft_source(draft: str, target: Callable[[], Checkpoint], others: Collection[str] = ()) -> str:
    """The path of a draft given as `DEFAULT` or by the name of one in the package; else `draft`.

    Args:
      draft: see `Config.draft`.
      target: opens the target that the draft is for.
      others: names of drafts that are no models.

    Raises:
      InputError: there is no draft for this target, one is damaged, or the draft is no path but
        nearly one of these names.
    """
    if draft != DEFAULT:
        shipped = {path.name: str(path) for path in _directories()}
        near = nearest(draft, [*others, DEFAULT, *shipped])
        is_name = "/" not in draft and draft not in (*others, *shipped)
        if near and is_name and not user_path(draft).exists():
            raise InputError(f"draft = {draft!r} does not exist; did you mean {near!r}?")
        return shipped.get(draft, draft)
    checkpoint = target()
    path = find_draft(checkpoint)
    if path is not None:
        return str(path)
    targets = ", ".join(sorted({draft.origin.target.source for draft in shipped_drafts()}))
    availability = f"yet, for {checkpoint.source} or any other target"
    if targets:
        availability = f"for {checkpoint.source}, only for {targets}"
    raise InputError(
        f"draft = {DEFAULT!r}: no draft comes with ssd_jax {availability}; name a draft's source, "
        "make a draft with `ssd-jax distill`, or decode with ngram and mode = sd"
    )
