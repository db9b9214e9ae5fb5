"""Rows of the tables of sizes in docs/deploy.md and docs/aot.md, of some chips and targets or all:
`python -m tests.tools.aot.sizes SLOTS [CHIP...] [TARGET...]`.

AR and SD on eight devices or four, whichever is faster; SSD with the target on four and the draft
on four or one. The last cells are milliseconds of a forward of one token and of a verification,
where AR is fastest, and the acceptance from which SD or SSD is faster. It needs JAX 0.12, libtpu
for TPUs, and the plugin for CUDA for GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax

from ssd_jax.config.config import Config
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from ssd_jax.speculation.fan_out import FanOut
from ssd_jax.tools.aot.chips import chip_named, devices
from ssd_jax.tools.aot.configurations import read_configuration
from ssd_jax.tools.aot.modes import Mode, pays_from
from ssd_jax.tools.aot.pair import ModelPair, modes_of
from ssd_jax.tools.aot.parts import ChipSlice
from ssd_jax.tools.aot.programs import Sizes

PAIRS = {
    "Llama-3.1-8B, Llama-3.2-1B": ("llama-3.1-8b", "llama-3.2-1b"),
    "Qwen3-32B, Qwen3-0.6B": ("qwen3-32b", "qwen3-0.6b"),
    "Llama-3.1-70B, Llama-3.2-1B": ("llama-3.1-70b", "llama-3.2-1b"),
    "Gemma-3-27B, Gemma-3-1B": ("gemma-3-27b", "gemma-3-1b"),
    "Qwen3-30B-A3B, Qwen3-0.6B": ("qwen3-30b-a3b", "qwen3-0.6b"),
    "gpt-oss-120b, gpt-oss-20b": ("gpt-oss-120b", "gpt-oss-20b"),
}
MXFP4 = GroupForm(FLOAT4, 32)
WEIGHTS = {"gpt-oss-120b": MXFP4, "gpt-oss-20b": MXFP4}
"""Of models whose experts are published in few bits."""
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
                weights=WEIGHTS.get(target),
                draft_weights=WEIGHTS.get(draft),
            )
            modes = modes_of(models, slice_, sizes)
            memory, speeds = zip(*(_cells(mode, modes, name, sizes) for mode in MODES), strict=True)
            cells = *memory, *speeds, *_widths(modes, name, sizes)
            print(f"| {pair} | 8 {name} | {' | '.join(cells)} |", flush=True)


def _fan_out() -> FanOut:
    return Config(mode="ssd", draft="none", k=str(K), budget=str(BRANCHES)).fan_out_of(K, BRANCHES)


def _cells(name: str, modes: Sequence[Mode], chip: str, sizes: Sizes) -> tuple[str, str]:
    """GiB of a device, and tokens/s with the devices, of the fastest mode of this name."""
    fan_out = _fan_out()
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


def _widths(modes: Sequence[Mode], chip: str, sizes: Sizes) -> tuple[str, str]:
    """Milliseconds of AR's round and of a verification there, and the least acceptance at which a
    draft pays."""
    fitting = [mode for mode in modes if mode.refused(chip_named(chip)) is None]
    plain = [mode for mode in fitting if mode.name == "ar"]
    if not plain:
        return "-", "-"
    verify = max(plain, key=lambda mode: mode.rate(0, sizes, _fan_out())).costs(sizes).verify
    least = pays_from(fitting, sizes, _fan_out())
    seconds = ", ".join(f"{1e3 * verify[width]:.2f}" for width in (0, K))
    return seconds, "none" if least is None else f"{least:.2f}"


if __name__ == "__main__":
    main()
