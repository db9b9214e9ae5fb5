"""`python -m tests.aot.sizes [CHIP ...]`: rows of the table of sizes in docs/deploy.md.

AR and SD on all eight devices, SSD with the target on four and the draft on four. It needs JAX
0.12, libtpu for TPUs, and the plugin for CUDA for GPUs.
"""

from __future__ import annotations

import sys

import jax

from ssd_jax.aot.chips import chip_named, devices
from ssd_jax.aot.configurations import read_configuration
from ssd_jax.aot.modes import Mode
from ssd_jax.aot.pair import ModelPair, modes_of
from ssd_jax.aot.parts import ChipSlice
from ssd_jax.aot.programs import Sizes
from ssd_jax.config import Config

PAIRS = {
    "Llama-3.1-8B, Llama-3.2-1B": ("llama-3.1-8b", "llama-3.2-1b"),
    "Qwen3-32B, Qwen3-0.6B": ("qwen3-32b", "qwen3-0.6b"),
    "Llama-3.1-70B, Llama-3.2-1B": ("llama-3.1-70b", "llama-3.2-1b"),
}
CHIPS = ("v5e", "v6e", "v5p", "tpu7x", "h100", "h200")
SPLIT = tuple(range(4)), tuple(range(4, 8))
SIZES = Sizes(slots=16, context=8192, k=4, branches=16)
ACCEPTANCES = (0.6, 0.8)


def main() -> None:
    """See the module."""
    jax.config.update("jax_platforms", "cpu")
    config = Config(mode="ssd", draft="none", k=str(SIZES.k), budget=str(SIZES.branches))
    fan_out = config.fan_out_of(SIZES.k)
    for name in sys.argv[1:] or CHIPS:
        chip, slice_ = chip_named(name), ChipSlice(name=name, devices=devices(name, 8))
        for pair, (target, draft) in PAIRS.items():
            about = ModelPair(
                target=read_configuration(target),
                draft=read_configuration(draft),
                target_dtype="bfloat16",
                draft_dtype="bfloat16",
            )

            def said(mode: Mode, chip=chip) -> list[str]:
                held = " + ".join(f"{share.total / 2**30:.1f}" for share in mode.shares())
                if mode.refused(chip) is not None:
                    return ["-", "-"]
                levels = ACCEPTANCES if mode.draft else ACCEPTANCES[:1]
                rates = [mode.rate(level, SIZES, fan_out) for level in levels]
                return [held, ", ".join(f"{rate:,.0f}" for rate in rates)]

            found = [said(mode) for mode in modes_of(about, slice_, SIZES, SPLIT)]
            cells = [held for held, _ in found] + [rates for _, rates in found]
            print(f"| {pair} | 8 {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
