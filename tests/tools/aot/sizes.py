"""Rows of the tables of sizes in docs/deploy.md and docs/aot.md, of some chips and targets or all:
`python -m tests.tools.aot.sizes SLOTS [CHIP...] [TARGET...]`.

AR and SD on eight devices or four, whichever is faster; SSD with the target on four and the draft
on four or one. It needs JAX 0.12, libtpu for TPUs, and the plugin for CUDA for GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax

from ssd_jax.config.config import Config
from ssd_jax.tools.aot.chips import chip_named, devices
from ssd_jax.tools.aot.configurations import read_configuration
from ssd_jax.tools.aot.modes import Mode
from ssd_jax.tools.aot.pair import ModelPair, modes_of
from ssd_jax.tools.aot.parts import ChipSlice
from ssd_jax.tools.aot.programs import Sizes

PAIRS = {
    "Llama-3.1-8B, Llama-3.2-1B": ("llama-3.1-8b", "llama-3.2-1b"),
    "Qwen3-32B, Qwen3-0.6B": ("qwen3-32b", "qwen3-0.6b"),
    "Llama-3.1-70B, Llama-3.2-1B": ("llama-3.1-70b", "llama-3.2-1b"),
    "Gemma-3-27B, Gemma-3-1B": ("gemma-3-27b", "gemma-3-1b"),
    "Qwen3-30B-A3B, Qwen3-0.6B": ("qwen3-30b-a3b", "qwen3-0.6b"),
}
MODES = "ar", "sd", "ssd"
CHIPS = ("v5e", "v6e", "v5p", "tpu7x", "h100", "h200")
ACCEPTANCES = (0.6, 0.8)
BRANCHES, K = 16, 4


def main() -> None:
    """See the module."""
    jax.config.update("jax_platforms", "cpu")
    slots, *names = sys.argv[1:]
    sizes = Sizes(slots=int(slots), context=8192, k=K, branches=BRANCHES)
    targets = [name for name in names if name not in CHIPS]
    for name in [name for name in names if name in CHIPS] or CHIPS:
        slice_ = ChipSlice(name=name, devices=devices(name, 8))
        for pair, (target, draft) in PAIRS.items():
            if targets and target not in targets:
                continue
            models = ModelPair(
                target=read_configuration(target),
                draft=read_configuration(draft),
                target_dtype="bfloat16",
                draft_dtype="bfloat16",
            )
            modes = modes_of(models, slice_, sizes)
            memory, speeds = zip(*(_cells(mode, modes, name, sizes) for mode in MODES), strict=True)
            print(f"| {pair} | 8 {name} | {' | '.join((*memory, *speeds))} |", flush=True)


def _cells(name: str, modes: Sequence[Mode], chip: str, sizes: Sizes) -> tuple[str, str]:
    """GiB of a device, and tokens/s with the devices, of the fastest mode of this name."""
    fan_out = Config(mode="ssd", draft="none", k=str(K), budget=str(BRANCHES)).fan_out_of(
        K, BRANCHES
    )
    fitting = [m for m in modes if m.name == name and m.refused(chip_named(chip)) is None]
    if not fitting:
        return "-", "-"
    fastest = max(fitting, key=lambda mode: mode.rate(ACCEPTANCES[-1], sizes, fan_out))
    memory = " + ".join(
        f"{group.need.total / 2**30:.1f}" for group in fastest.needs(chip_named(chip))
    )
    levels = ACCEPTANCES if fastest.draft else ACCEPTANCES[:1]
    rates = ", ".join(f"{fastest.rate(level, sizes, fan_out):,.0f}" for level in levels)
    return memory, f"{rates} on {str(fastest).removeprefix(name).strip()}"


if __name__ == "__main__":
    main()
