"""`ssd-jax convert`: writes any supported checkpoint in our own format, which loads in seconds."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ssd_jax.cli import settings
from ssd_jax.cli.loading import progress_bar
from ssd_jax.errors import InputError
from ssd_jax.system.paths import require_free, require_writable, user_path

_DTYPES = ("float32", "bfloat16")
_SETTINGS = ("target", "dtype", "out", "config")


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags({"out": "directory to write; must not exist, or be empty"})
    values["dtype"].help, values.choices["dtype"] = "dtype to store", _DTYPES
    options = settings.parse(
        values, "convert", arguments, hidden=[name for name in values if name not in _SETTINGS]
    )
    config = settings.config_of(options)
    settings.require_used(values, "convert", _SETTINGS)
    if not options["out"]:
        raise InputError("give --out=DIRECTORY")

    if config.dtype not in _DTYPES:
        raise InputError(
            f"dtype = {config.dtype!r} cannot be stored; give one of {', '.join(_DTYPES)}"
        )

    from ssd_jax.checkpoints.opening import open_checkpoint
    from ssd_jax.checkpoints.orbax import write_checkpoint

    out = user_path(options["out"])
    require_free(out)
    require_writable("out", out, atomic=True)
    with progress_bar("downloading", unit="bytes") as progress:
        checkpoint = open_checkpoint(config.target, progress=progress)
    with progress_bar("converting", unit="bytes") as progress:
        write_checkpoint(out, checkpoint, config.dtype, progress=progress)
    print(f"wrote {out}; use it as --target={out}", file=sys.stderr)
    return 0
