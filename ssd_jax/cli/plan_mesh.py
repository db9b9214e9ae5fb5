"""`ssd-jax plan-mesh`: devices of target and draft, and what each holds, before anything loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.text import Text

from ssd_jax.cli import settings
from ssd_jax.cli.flag_help import SAMPLING
from ssd_jax.cli.loading import open_llm
from ssd_jax.errors import InputError
from ssd_jax.placement.visible import PROCESSOR
from ssd_jax.tools.bench.table import Column, Page, build_table

if TYPE_CHECKING:
    from ssd_jax.config.config import Config
    from ssd_jax.devices.paged_programs import Paging
    from ssd_jax.llm.llm import LLM
    from ssd_jax.models.functional import FunctionalModel
    from ssd_jax.placement.visible import Devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What each device of a role holds; pairs are its part and the whole.

    Attributes:
      weights, kv: bytes on a device.
    """

    role: str
    devices: int
    slots: tuple[int, int]
    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    ffn: tuple[int, int]
    vocab: tuple[int, int]
    weights: int
    kv: int


_FLAGS: settings.FlagSpecs = {
    "devices": (
        *("int", None),
        "plan for this many devices not present; default: those of this host",
    ),
    "platform": ("str", None, "platform of --devices: tpu (the default), gpu or cpu"),
}

_OF_REQUESTS = (*SAMPLING, "chat_template", "generation_config", "logprobs_of", "trace")
"""Settings that have no effect here: accepted, so that a whole command line can be planned."""

_MOST = 4096  # JAX makes a thread for each device that is pretended


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags(_FLAGS)
    given = settings.parse(values, "plan-mesh", arguments, hidden=_OF_REQUESTS)
    config = settings.config_of({**given, "trace": None})
    count, platform = given["devices"], given["platform"]
    if platform not in (None, "tpu", "gpu", "cpu"):
        raise InputError(f"platform = {platform!r} is unknown; give tpu, gpu or cpu")
    if count is not None:
        settings.at_least(given, devices=1)
        if count > _MOST:
            raise InputError(f"devices = {count} is out of range; give 1 to {_MOST}")
        if config.hosts is not None:
            raise InputError(
                f"hosts = {config.hosts!r} are waited for, and devices = {count} are not here; "
                "leave out one"
            )
        _pretend(count)
        config = _placed(config, platform or "tpu", count)
    elif platform is not None:
        raise InputError(f"platform = {platform!r} is of devices that are not here; give --devices")
    with open_llm(config) as llm:
        _show(llm)
    return 0


def _pretend(devices: int) -> None:
    """Makes JAX present this processor as that many devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError as error:
        raise InputError(f"devices = {devices} comes too late: {error}") from None


def _placed(config: Config, platform: str, count: int) -> Config:
    """The settings with the placement for `count` devices of a platform; prints a line about it.

    Raises:
      InputError: devices that do not exist.
    """
    from ssd_jax.placement.device_groups import devices_taken
    from ssd_jax.placement.placement import choose

    said = f"planned for {count} devices of the platform {platform}"
    if platform != "cpu":
        said += f", which are drawn as cpu:0 to cpu:{count - 1}"
    groups, grid, kind = config.device_groups, config.grid, config.draft_placement
    if config.prepared == "ssd" and kind in (None, "auto"):
        kind, why = choose(groups, grid, platform, count, claimable=platform == "gpu")
        said += f"; {why}"
        config = dataclasses.replace(config, draft_placement=kind)
    own = groups.draft or devices_taken(groups, grid) < count
    there = platform == "gpu" and kind == "process" and groups.platform != "cpu" and own
    if there:
        target, draft = groups.split(count, grid, config.workers)
        target, draft = (",".join(map(str, each)) for each in (target, draft))
        config = dataclasses.replace(config, target_devices=target, draft_devices=f"cpu:{draft}")
    beside = config.draft_model and platform != "cpu" and (there or kind != "process")
    if beside and config.dtype not in (
        "native",
        "auto",
    ):  # else it would compute as on this processor
        config = dataclasses.replace(config, draft_dtype=config.draft_dtype or config.dtype)
    Console().print(Text(said))
    return config


def _show(llm: LLM) -> None:
    from ssd_jax.devices.fallbacks import mesh_lines
    from ssd_jax.devices.paged_programs import Paging, page_size

    console, placement = Console(), llm.placement
    roles = [("target", llm.target.model)]
    if llm.draft is not None and placement.kind != "remote":
        roles.append(("draft", _of_worker(llm.draft.model, placement.workers[0])))
    console.print(Text(f"{placement}\n", style="bold"))
    for role, model in roles:
        if model.mesh is not None and role in placement.devices:
            console.print(_grid(role, model.mesh.axis_sizes, placement.devices[role]))
            console.print()
    slots, size = llm.config.slots, page_size(llm.context)
    own = {role: slots for role, _ in roles}
    if llm.draft is not None and placement.kind == "process":
        own["draft"] = placement.layout.slots_each(slots)
        for worker in placement.workers:
            where = "this host's processor" if worker == PROCESSOR else ", ".join(worker.names)
            console.print(f"draft: a process of its own on {where}\n")
    shares = [
        share_of(role, model, slots, llm.paging or Paging(size, own[role]), own[role])
        for role, model in roles
    ]
    notes = [line for role, model in roles for line in mesh_lines(role, model)]
    console.print(build_table(_COLUMNS, shares, title="each device holds", notes=notes))


def share_of(
    role: str, model: FunctionalModel, slots: int, paging: Paging, own: int | None = None
) -> Share:
    """What each device of a model's mesh holds, for `slots` slots in all.

    Args:
      paging: of the mesh.
      own: slots of this mesh, where each draft worker has some; default: all.
    """
    from ssd_jax.devices.fit import ModelBytes
    from ssd_jax.devices.sizes import bytes_per_device
    from ssd_jax.models.sharding import TENSOR_AXIS

    config, rules = model.config, model.rules
    tensor = 1 if model.mesh is None else model.mesh.shape[TENSOR_AXIS]

    def part(whole: int, axis: str | None) -> tuple[int, int]:
        return (whole if axis is None else whole // tensor), whole

    held = ModelBytes(model=model, slots=own or slots, paging=paging, size_of=bytes_per_device)
    kv_heads, _ = part(model.kv_heads, rules.kv_heads)
    return Share(
        role=role,
        devices=1 if model.mesh is None else model.mesh.size,
        slots=((own or slots) // model.data_shards, slots),
        heads=part(config.num_heads, rules.heads),
        kv_heads=(kv_heads, config.num_kv_heads),
        ffn=part(config.intermediate_size, rules.ffn),
        vocab=part(config.outputs, rules.outputs),
        weights=held.weights,
        kv=held.pages,
    )


def _of_worker(model: FunctionalModel, worker: Devices) -> FunctionalModel:
    """The model on a worker's devices, which this process need not have."""
    from jax.sharding import AbstractMesh, Mesh

    from ssd_jax.models.functional import FunctionalModel
    from ssd_jax.models.sharding import DATA_AXIS, TENSOR_AXIS

    if len(worker.numbers) == 1:
        return model
    mesh = AbstractMesh((1, len(worker.numbers)), (DATA_AXIS, TENSOR_AXIS))
    return FunctionalModel(
        model.config,
        dataclasses.replace(model.execution, linear="xla"),  # packed weights are not cut
        mesh=cast("Mesh", mesh),  # nothing is put there
        output_ids=model.output_ids,
        stored=model.stored,
    )


def _grid(role: str, shape: Sequence[int], names: Sequence[str]) -> Page:
    """A table of the devices, a row for each group that shares a model."""
    data, tensor = shape
    columns: list[Column[int]] = [
        Column("", lambda group: f"data {group}", "left"),
        *(
            Column(f"tensor {i}", lambda group, i=i: names[group * tensor + i])
            for i in range(tensor)
        ),
    ]
    return build_table(columns, range(data), title=f"devices of the {role}")


def _of(part: tuple[int, int]) -> str:
    return f"{part[0]} of {part[1]}"


_COLUMNS: list[Column[Share]] = [
    Column("role", lambda share: share.role, "left"),
    Column("devices", lambda share: str(share.devices)),
    Column("slots", lambda share: _of(share.slots)),
    Column("query heads", lambda share: _of(share.heads)),
    Column("key/value heads", lambda share: _of(share.kv_heads)),
    Column("channels", lambda share: _of(share.ffn)),
    Column("vocabulary", lambda share: _of(share.vocab)),
    Column("weights, MiB", lambda share: f"{share.weights / 2**20:.1f}"),
    Column("keys and values, MiB", lambda share: f"{share.kv / 2**20:.1f}"),
]
