"""`ssd-jax aot`: whether a pair of models fits a mesh of chips that need not be there, and its
speed at best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ssd_jax.cli import settings
from ssd_jax.cli.entries import wrap_text
from ssd_jax.cli.loading import progress_bar
from ssd_jax.compat import require_whole_programs
from ssd_jax.config.config import Config
from ssd_jax.config.settings import BUDGET, MAX_BUDGET, MAX_K, MODEL_K
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from ssd_jax.roles.drafting import MAX_NODES
from ssd_jax.speculation.fan_out import LEAST_BUDGET
from ssd_jax.speculation.text_drafts import TEXT_DRAFTS

_SETTINGS = (
    *("target", "draft", "dtype", "draft_dtype", "k", "budget", "fan_out", "slots", "context"),
    *("mesh", "expert_parallel", "target_devices", "draft_devices", "tree_nodes", "config"),
)
_FLAGS: settings.FlagSpecs = {
    "chip": (
        "str",
        None,
        "what the devices are",
        ("v4", "v5e", "v5p", "v6e", "tpu7x", "a100", "h100", "h200", "b200"),
    ),
    "devices": (
        *("int", None),
        "number of devices in the slice or GPU machine; default: those of --mesh",
    ),
    "weights": (
        "str",
        None,
        "how matrices of the target's layers are stored, with scales of 128 inputs each, or in "
        "mxfp4 those of its experts, of 32; default: in its dtype",
        ("int4", "int8", "float8", "mxfp4"),
    ),
    "draft_weights": (
        *("str", None, "those of the draft, as weights; default: in its dtype"),
        ("int4", "int8", "float8", "mxfp4"),
    ),
    "compile": ("bool", True, "compile all programs; --compile=false gives sizes alone, at once"),
}
_DTYPES = ("bfloat16", "int8", "float32")
_TEXTS = {
    "target": "target model: a name such as llama-3.1-8b, a config.json or its directory, a GGUF "
    "file, or hf:org/name[@revision]",
    "draft": "draft model, as for target",
    "dtype": "compute dtype",
    "draft_dtype": "compute dtype of the draft; default: dtype",
    "mesh": "grid of the target's devices, such as tensor=4 or data=2,tensor=4; default: one "
    "group, of several sizes",
    "k": f"tokens proposed per round, 1 to {MAX_K}; default {MODEL_K}",
    "target_devices": "numbers of the target's devices, such as 0-3; without these and "
    "draft_devices two splits are compared",
    "draft_devices": "numbers of the draft's devices; default: those that the target leaves",
    "tree_nodes": f"trees of up to {MAX_NODES} tokens, beside chains; default 0, none",
    "budget": f"branches per sequence, {LEAST_BUDGET} to {MAX_BUDGET}; default {BUDGET}",
}
"""Help of settings that mean less here than in other commands."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags(_FLAGS, target=None)
    for name, text in _TEXTS.items():
        values[name].help = text
    values.choices.update(dtype=_DTYPES, draft_dtype=_DTYPES)
    hidden = [name for name in values if name not in (*_SETTINGS, *_FLAGS)]
    options = settings.parse(values, "aot", arguments, hidden=hidden)
    settings.require_used(values, "aot", (*_SETTINGS, *_FLAGS))
    for name in ("target", "draft", "chip", *(["devices"] if options["mesh"] is None else [])):
        if options[name] is None:
            raise InputError(f"give --{name}, as in {_EXAMPLE}")
    if options["draft"] in TEXT_DRAFTS:
        raise InputError(
            f"draft = {options['draft']!r}: a draft without a model has no programs; name a model"
        )
    settings.at_least(options, devices=1)
    placement = "submesh" if options["target_devices"] or options["draft_devices"] else None
    nodes = options["tree_nodes"]
    if nodes is not None:  # checks
        of_trees = {"target": options["target"], "draft": options["draft"], "k": options["k"]}
        nodes = settings.config_of({**of_trees, "mode": "sd", "tree_nodes": nodes}).tree_nodes
    with_branches = {"tree_nodes": None, "mode": "ssd", "draft_placement": placement}
    config = settings.config_of({**options, **with_branches})
    draft_dtype = config.draft_dtype or config.dtype
    for name, dtype in (("dtype", config.dtype), ("draft_dtype", draft_dtype)):
        if dtype not in _DTYPES:
            raise InputError(
                f"{name} = {dtype!r} is for processors; give one of {', '.join(_DTYPES)}"
            )
    for name, dtype in (("", config.dtype), ("draft_", draft_dtype)):
        if (weights := options[f"{name}weights"]) is not None and dtype != "bfloat16":
            raise InputError(
                f"{name}weights = {weights!r} are multiplied in bfloat16, and {name}dtype = "
                f"{dtype!r}; leave out one"
            )
    for name, value in (("k", config.k), ("budget", config.budget), ("tree_nodes", nodes)):
        if value == "auto":
            raise InputError(f"{name} = 'auto' needs measured costs; give a number")
    platform = config.device_groups.platform
    if platform is not None:
        raise InputError(f"devices of {platform}: --chip says what they are; give numbers alone")
    return _show(config, draft_dtype, {**options, "tree_nodes": nodes or 0})


_FORMS = {
    name: GroupForm(dtype, group=128)
    for name, dtype in (("int4", "int4"), ("int8", "int8"), ("float8", "float8_e4m3fn"))
} | {"mxfp4": GroupForm(FLOAT4, group=32)}
_EXAMPLE = "ssd-jax aot --target=llama-3.1-8b --draft=llama-3.2-1b --chip=v6e --devices=8"


def _show(config: Config, draft_dtype: str, options: Mapping[str, Any]) -> int:
    import jax
    from rich.console import Console

    # Before anything asks for devices, so that this machine's are not taken.
    jax.config.update("jax_platforms", "cpu")

    from ssd_jax.loading.context import fitting_context
    from ssd_jax.tools.aot.chips import absent_devices, chip_named, devices
    from ssd_jax.tools.aot.configurations import read_configuration, require_same_words
    from ssd_jax.tools.aot.page import build_page
    from ssd_jax.tools.aot.pair import ModelPair, modes_of
    from ssd_jax.tools.aot.parts import ChipSlice
    from ssd_jax.tools.aot.programs import Sizes

    name, grid = options["chip"], config.grid
    count = options["devices"] or (0 if grid is None else grid.devices)
    chip = chip_named(name)
    assert config.draft is not None
    pair = ModelPair(
        target=read_configuration(config.target),
        draft=read_configuration(config.draft),
        target_dtype=config.dtype,
        draft_dtype=draft_dtype,
        weights=_FORMS.get(options["weights"]),
        draft_weights=_FORMS.get(options["draft_weights"]),
        expert_parallel=config.expert_parallel,
    )
    for flag, source, model in (
        ("weights", config.target, pair.target),
        ("draft_weights", config.draft, pair.draft),
    ):
        if options[flag] == "mxfp4" and model.mechanisms.experts is None:
            raise InputError(
                f"{flag} = 'mxfp4' are those of experts, and {source} has none; leave it out, "
                "or give int4"
            )
    require_same_words(config.target, pair.target, config.draft, pair.draft)
    limits = {config.target: pair.target.max_context, config.draft: pair.draft.max_context}
    sizes = Sizes(
        slots=config.slots,
        context=fitting_context(config, limits, [config.speculated]),
        k=config.speculated,
        branches=max(config.budgets_at()),
        nodes=options["tree_nodes"],
    )
    groups = config.device_groups
    has_groups = groups.target is not None or groups.draft is not None
    if grid is not None:
        groups.of_target(count, grid)
    split = groups.split(count, grid) if has_groups else None
    if options["compile"]:
        require_whole_programs()
    find = devices if options["compile"] else absent_devices
    slice_ = ChipSlice(name=name, devices=find(name, count))
    with progress_bar("compiling", unit="programs") as progress:
        modes = modes_of(pair, slice_, sizes, split, grid, progress)
    devices_text, of_target = f"{count} {name}", options["weights"] or config.dtype
    of_draft = options["draft_weights"] or draft_dtype
    title = (
        f"{config.target} ({of_target}) with {config.draft} ({of_draft}) on {devices_text}: "
        f"slots = {sizes.slots}, context = {sizes.context}, k = {sizes.k}, "
        f"budget = {sizes.branches}"
        + (f", tree_nodes = {sizes.nodes}" if sizes.nodes else "")
        + ("" if grid is None else f", mesh = {grid}")
        + (", expert_parallel" if config.expert_parallel else "")
    )
    fan_out = config.fan_out_of(sizes.k, sizes.branches)
    for item in build_page(modes, chip, sizes, fan_out, title=title, where=devices_text):
        if isinstance(item, str):
            print(*map(wrap_text, item.split("\n")), sep="\n")
        else:
            Console().print(item)
    return 0
