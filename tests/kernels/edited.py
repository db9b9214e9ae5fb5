"""Handlers of sources in which one text is another."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from types import ModuleType

import jax
import pytest

from ssd_jax.kernels import handlers


def use_edited(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    path: str,
    edit: tuple[str, str],
    calls: dict[tuple[ModuleType, str], str],
) -> None:
    """Has calls take the handlers of an edited source; caches of programs are the caller's.

    Args:
      directory: an empty one, for the sources and the library.
      path: of the edited file, in `ssd_jax/kernels`.
      edit: the old text, which is there once, and the new one.
      calls: by module and name of its constant, the handler that this constant names.
    """
    kernels = directory / "kernels"
    shutil.copytree(Path(handlers.__file__).parent, kernels)
    file = kernels / path
    text = file.read_text()
    assert text.count(edit[0]) == 1, "an edit must fit the source exactly once"
    file.write_text(text.replace(*edit))
    library = ctypes.CDLL(str(handlers.build([file.with_name("cpu.cc")], directory)))
    for (module, constant), handler in calls.items():
        name = f"{handler} with {edit}"
        capsule = jax.ffi.pycapsule(getattr(library, handler))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
        monkeypatch.setattr(module, constant, name)
