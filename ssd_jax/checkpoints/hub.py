"""`hf:` sources: a snapshot of a Hugging Face repository, from its cache or the network."""

from __future__ import annotations

import re
from pathlib import Path

from ssd_jax.errors import InputError

_SOURCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^\s@]+))?")
_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "tokenizer*"]
_OTHER_FORMATS = ["*/*", "consolidated*.safetensors"]  # folders, and second copies of the weights


def snapshot(name: str) -> Path:
    """The local directory of `org/name[@revision]`, downloaded if the cache lacks it.

    Only configuration, tokenizer and safetensors files are fetched. Huggingface_hub draws its own
    progress bars on standard error and honours its own settings (HF_HOME, HF_TOKEN,
    HF_HUB_OFFLINE).

    Raises:
      InputError: a malformed name, a repository or revision that does not exist or is gated, or
        files that are neither in the cache nor reachable.
    """
    match = _SOURCE.fullmatch(name)
    if match is None:
        raise InputError(
            f"'hf:{name}' is not a model on the Hugging Face hub; expected hf:org/name or "
            "hf:org/name@revision"
        )
    import huggingface_hub
    from huggingface_hub import errors

    repo, revision = match["repo"], match["revision"]
    try:
        directory = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=_FILES, ignore_patterns=_OTHER_FORMATS
        )
    except errors.GatedRepoError:
        raise InputError(
            f"hf:{name} is gated: accept its conditions at https://huggingface.co/{repo}, then log "
            "in with `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"hf:{name} does not exist on the hub, or is private; check the spelling, and for a "
            "private repository log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(
            f"hf:{repo} has no revision {revision!r}; see https://huggingface.co/{repo}/tree/main"
        ) from None
    except errors.HFValidationError as error:
        raise InputError(f"hf:{name} is not a valid repository name: {error}") from None
    except PermissionError as error:
        raise InputError(f"hf:{name}: {error}") from None
    except Exception as error:  # network errors of whichever HTTP library the hub client uses
        raise InputError(
            f"hf:{name} is not (or not wholly) in the cache "
            f"({huggingface_hub.constants.HF_HUB_CACHE}) and the hub cannot be reached "
            f"({_first_line(error)}). Connect to the network (and unset HF_HUB_OFFLINE), or give a "
            "path to a local copy"
        ) from None
    return Path(directory)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
