"""`python -m tests.tools.aot.stages [CHIP ...]`: the stage times that `ssd-jax demo` predicts with.

Seconds of the parts of a round of one sequence, as `ssd-jax aot` predicts them: the target on some
devices in every mode, SD's draft on the same, SSD's draft on one more. It prints the content of
`ssd_jax/tools/demo/accelerators.json`. It needs JAX 0.12, libtpu for TPUs, and the plugin for CUDA
for GPUs, and takes some minutes a chip.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata

import jax

from ssd_jax.tools.aot.chips import chip_named, devices
from ssd_jax.tools.aot.configurations import read_configuration
from ssd_jax.tools.aot.modes import Mode
from ssd_jax.tools.aot.parts import ChipSlice, ModelPart, build, draft_names, target_names
from ssd_jax.tools.aot.programs import Sizes

TARGET, DRAFT = "llama-3.1-70b", "llama-3.2-1b"
TARGET_DEVICES = {"h100": 4, "v6e": 8}
SIZES = Sizes(slots=1, context=8192, k=4, branches=16)
PACKAGES = ("jax", "libtpu", "jax-cuda13-plugin")


def built(slice_: ChipSlice, role: str, places: tuple[int, ...], *, branches: bool) -> ModelPart:
    """A model on the devices at these places, compiled."""
    source = TARGET if role == "target" else DRAFT
    model = slice_.model(read_configuration(source), "bfloat16", places)
    names = draft_names(SIZES, branches=branches)
    if role == "target":
        names = target_names(SIZES, model)
    return build(
        role,
        model,
        names,
        chip=slice_.chip,
        places=places,
        sizes=SIZES,
        done=lambda name: print(role, *name, file=sys.stderr),
    )


def seconds(name: str, count: int) -> dict[str, float | int]:
    """The stage times on this chip, with the target on so many devices."""
    slice_ = ChipSlice(name=name, devices=devices(name, count + 1))
    every = tuple(range(count))
    target = built(slice_, "target", every, branches=False)
    beside = built(slice_, "draft", every, branches=False)
    elsewhere = built(slice_, "draft", (count,), branches=True)
    sd = Mode(name="sd", target=target, draft=beside)
    ssd = Mode(name="ssd", target=target, draft=elsewhere)
    for mode in (sd, ssd):
        if (why := mode.refused(chip_named(name))) is not None:
            raise SystemExit(f"{name}: {why}")
    of_sd, of_ssd = sd.costs(SIZES), ssd.costs(SIZES)
    times = {
        "forward": of_sd.verify_seconds(0),
        "verify": of_sd.verify_seconds(SIZES.k),
        "draft": of_sd.draft,
        "backup": of_ssd.backup,
        "branches": of_ssd.step[SIZES.branches],
    }
    return {"target_devices": count} | {part: round(each, 9) for part, each in times.items()}


def main() -> None:
    """See the module."""
    jax.config.update("jax_platforms", "cpu")
    chips = sys.argv[1:] or TARGET_DEVICES
    about = {
        "command": "python -m tests.tools.aot.stages",
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "target": TARGET,
        "draft": DRAFT,
        **{name: getattr(SIZES, name) for name in ("slots", "context", "k", "branches")},
    }
    found = {name: seconds(name, TARGET_DEVICES[name]) for name in chips}
    print(json.dumps({**about, "chips": found}, indent=2))


if __name__ == "__main__":
    main()
