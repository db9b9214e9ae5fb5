"""Facts that must agree on all hosts, so that they run the same programs on the same weights."""

from __future__ import annotations

import platform

import jax

from ssd_jax.devices.opening.models import OpenedModel
from ssd_jax.system.environment import versions


def process_facts() -> dict[str, str]:
    """Facts about versions and devices."""
    package_versions = versions()
    kinds = sorted({device.device_kind for device in jax.local_devices()})
    return {
        **{name: str(package_versions[name]) for name in ("ssd_jax", "jax", "jaxlib")},
        "platform": jax.default_backend(),
        "kind of devices": ", ".join(kinds),
        "machine": platform.machine(),
    }


def model_facts(role: str, opened: OpenedModel) -> dict[str, str]:
    """Facts about a model.

    Raises:
      InputError: tensor data cannot be read.
    """
    return {
        f"fingerprint of the {role} ({opened.source})": opened.fingerprint[:16],
        f"weights of the {role} ({opened.source})": opened.weights[:16],
    }
