"""What must be the same on all hosts, so that they run the same programs on the same weights."""

from __future__ import annotations

import hashlib
import platform

import jax
import numpy as np

from ssd_jax.devices.opened import OpenedModel
from ssd_jax.system.environment import versions

_TENSORS = 64  # of which a row is looked at


def of_process() -> dict[str, str]:
    """Facts of versions and devices."""
    found = versions()
    kinds = sorted({device.device_kind for device in jax.local_devices()})
    return {
        **{name: str(found[name]) for name in ("ssd_jax", "jax", "jaxlib")},
        "platform": jax.default_backend(),
        "kind of devices": ", ".join(kinds),
        "machine": platform.machine(),
    }


def of_model(role: str, opened: OpenedModel) -> dict[str, str]:
    """Facts of a model; of its weights the first row of some tensors.

    Raises:
      InputError: tensor data that cannot be read.
    """
    tensors, digest = opened.checkpoint.tensors, hashlib.sha256()
    names = sorted(tensors.shapes.keys() & opened.model.wanted().keys())
    for name in names[:: -(-len(names) // _TENSORS) or 1]:
        row = tensors.read(name, (slice(0, 1),))
        digest.update(f"{name} {tensors.shape(name)}".encode())
        digest.update(np.ascontiguousarray(row).view(np.uint8).data)
    return {
        f"fingerprint of the {role} ({opened.source})": opened.fingerprint[:16],
        f"weights of the {role} ({opened.source})": digest.hexdigest()[:16],
    }
