"""What a measurement was made with: device, versions, commit, processor."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

PACKAGES = ("jax", "jaxlib", "flax", "numpy")


class Device(Protocol):
    """The attributes of a `jax.Device` that are used here."""

    device_kind: str
    platform: str
    client: Any


def describe() -> dict[str, Any]:
    """Facts about this process's environment and the default device, ready for JSON; unknown
    ones are null."""
    import jax

    device = jax.devices()[0]
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "device_count": device.client.device_count(),
        "platform": device.platform,
        "versions": versions(),
        **commit(Path(__file__).parents[2]),
        "cpu_model": cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpu_affinity": cpu_affinity(),
        "os": platform.platform(),
    }


def headline(environment: Mapping[str, Any]) -> str:
    """One line to print above a table."""
    cpus, cores = environment["cpu_affinity"], environment["cpu_count"]
    usable = cores if cpus is None else len(cpus)
    device = environment["device"]
    if environment["platform"] == "cpu":
        device = environment["cpu_model"] or device
    commit, versions = environment["commit"], environment["versions"]
    changes = "+changes" if environment["commit_modified"] else ""
    package = commit[:9] + changes if commit else versions["ssd_jax"] or "not installed"
    return f"{device}, {usable}/{cores} cores, jax {versions['jax']}, ssd_jax {package}"


def versions() -> dict[str, str | None]:
    """Versions of Python and of relevant packages; None if not installed."""
    result: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("ssd-jax", *PACKAGES):
        name = package.replace("-", "_")
        result[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            result[name] = importlib.metadata.version(package)
    return result


def commit(root: Path) -> dict[str, Any]:
    """The git commit of `root` and whether tracked files differ from it; None outside a checkout.

    Only a repository whose top is `root` counts: an installed package may lie inside another one.
    """
    unknown = {"commit": None, "commit_modified": None}
    if not (root / ".git").exists():
        return unknown
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        description = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no commit yet
        return unknown
    modified = description.endswith("-dirty")
    return {"commit": description.removesuffix("-dirty"), "commit_modified": modified}


def cpu_model() -> str | None:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or None


@functools.cache
def processor() -> str:
    """What determines the instructions that a compiler may use on this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(fields)}))


def cpu_affinity() -> list[int] | None:
    """The CPUs that this process may use; None if the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return sorted(os.sched_getaffinity(0))
