"""Finds and reports what runs in place of what was asked for, or of what is usual."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import jax

from ssd_jax.devices.opening.exactness import (
    costs_nothing,
    rows_can_agree,
    tree_agrees,
    widths_agree,
)
from ssd_jax.devices.opening.models import device_of, why_unread
from ssd_jax.devices.programs.batch_sizes import TRIALS
from ssd_jax.errors import InputError
from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.experts.api import why_looped
from ssd_jax.kernels.experts.groups import ExpertGroupStructs, device_form
from ssd_jax.kernels.handlers import why_missing, why_not_cached
from ssd_jax.kernels.tree_attention.api import KERNEL_BACKENDS, choice_line
from ssd_jax.kernels.verify import api as verify
from ssd_jax.models.sharding import TENSOR_AXIS, spans_processes

if TYPE_CHECKING:
    from ssd_jax.devices.target.programs import Programs
    from ssd_jax.models.functional import FunctionalModel, Parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallbacks:
    """The exactness that holds, and everything else that is not as usual.

    Attributes:
      exact: "bitwise" or "distribution".
      metrics: for every request; see docs/metrics.md.
      lines: one line for the user on each fallback.
    """

    exact: str
    metrics: dict[str, Any]
    lines: tuple[str, ...] = ()


def find_fallbacks(
    exact: str, programs: Programs, parameters: Parameters, draft: FunctionalModel | None
) -> Fallbacks:
    """Decides the exactness; where widths disagree, bitwise mode runs everything at the widest.

    Args:
      exact: as configured.
      programs, parameters: of the target.
      draft: the draft model; None without one.
    """
    compute, lines = programs.model.execution.compute.name, []
    exactness, reason = exact, ""
    if exact == "auto" and not costs_nothing(programs.model.execution):
        exactness = "distribution"
        reason = f"bitwise costs speed with {compute}, `exact='bitwise'` has it anyway"
    elif exact != "distribution" and _agree(programs, parameters):
        exactness = "bitwise"
    elif exact == "bitwise" and programs.verification.nodes:
        raise InputError(
            f"exact = 'bitwise' is not possible with tree_nodes = {programs.verification.nodes}: "
            f"attention = {programs.model.execution.attention!r} with {compute} computes a token "
            "of a tree in another way than one alone; leave out tree_nodes, or exact"
        )
    elif exact != "distribution":
        exactness = "widest" if exact == "bitwise" else "distribution"
        reason = f"with {compute} a token's computation depends here on how many are beside it"
    if reason and programs.verification.nodes:
        lines.append(f"exact = {exact!r} is distribution: {reason}")
    elif reason and len(programs.widths) > 1:
        remedy = f"verifies as many as {programs.widths[-1]} proposed tokens every time"
        lines.append(
            f"exact = {exact!r} {remedy if exactness == 'widest' else 'is distribution'}: {reason}"
        )
    if exactness == "widest":
        programs.widths = programs.widths[-1:]
    lines += _batch_lines(programs, exactness)
    models = {"target": programs.model} | ({} if draft is None else {"draft": draft})
    page_size = kv_pages.BLOCK if programs.paging is None else programs.paging.size
    lines += _uncompiled_lines(models.values(), page_size)
    lines += _verification_lines(programs.model)
    lines += _group_lines(models.values())
    for role, model in models.items():
        lines += mesh_lines(role, model) + loop_lines(role, model, jax.default_backend())
    replicated = {
        role: list(m.rules.replicated_axes) for role, m in models.items() if m.rules.replicated_axes
    }
    return Fallbacks(
        exact="bitwise" if exactness == "widest" else exactness,
        metrics={"exact": exactness, "replicated": replicated or None},
        lines=tuple(lines),
    )


def _agree(programs: Programs, parameters: Parameters) -> bool:
    trees = programs.verification.nodes > 0
    if len(programs.widths) == 1 and not trees:
        return True
    if not rows_can_agree(programs.model.execution) or not widths_agree(programs, parameters):
        return False
    return not trees or tree_agrees(programs, parameters)


def _batch_lines(programs: Programs, exactness: str) -> list[str]:
    """Has batch sizes tried in the bitwise mode; a line where there is none but that of all slots.

    They agree with it or not once they run beside it, over texts of users.
    """
    sizes = programs.batch_sizes
    *smaller, all_slots = sizes.sizes
    if not smaller or exactness == "distribution":
        return []
    several_hosts = spans_processes(programs.model.mesh)
    if exactness == "bitwise" and rows_can_agree(programs.model.execution) and not several_hosts:
        sizes.trials = TRIALS
        return []
    sizes.drop(*smaller)
    if several_hosts:
        return [
            f"every round runs all {all_slots} slots: exact is bitwise, and with hosts no smaller "
            "batch can be compared with that; give exact = distribution"
        ]
    return [
        f"every round runs all {all_slots} slots: with {programs.model.execution.compute.name} a "
        "token's computation depends here on how many are beside it"
    ]


def _uncompiled_lines(models: Collection[FunctionalModel], page_size: int) -> list[str]:
    """Lines on products and attention that are not the usual compiled kernels.

    On CPU, one for each reason why they are XLA's or compiled at every start; on other platforms,
    lines on the attention that was chosen.
    """
    platform = jax.default_backend()
    choices = [(m.execution.attention, 1 if m.mesh is None else m.mesh.size) for m in models]
    if platform != "cpu":
        lines = []
        for model, choice in zip(models, choices, strict=True):
            place = model.execution, model.config.head_dim, device_of(model)
            why_not = {
                backend: why_unread(*place, attention=backend, size=page_size)
                for backend in KERNEL_BACKENDS
            }
            lines.append(choice_line(choice[0], platform, choice[1], why_not))
        return [*dict.fromkeys(lines)]
    reasons = [
        why_missing() if size == 1 else f"the compiled ones run on one device, not {size}"
        for name, size in choices
        if size == 1 or name != "cpu"
    ]
    lines = [
        f"products and attention are XLA's, which is slower here: {reason}"
        for reason in dict.fromkeys(reasons)
        if reason is not None
    ]
    on_one_device = any(size == 1 for _, size in choices) and why_missing() is None
    if on_one_device and (not_cached := why_not_cached()) is not None:
        lines.append(f"kernels are compiled anew at every start: {not_cached}")
    return lines


def _group_lines(models: Collection[FunctionalModel]) -> list[str]:
    """Lines on weights in groups that are not read as they are, or take more time than floats."""
    lines = []
    if jax.default_backend() == "cpu" and any(model.has_groups for model in models):
        lines.append(
            "dtype = 'native' makes bfloat16 of quantised weights in every product here, which "
            "takes time: a processor multiplies them as they are on one device, with a C++ compiler"
        )
    count = sum(model.ungrouped for model in models)
    if count:
        lines.append(
            f"{count} quantised weights are bfloat16: layers run in one loop, and in another layer "
            "the same weight is stored otherwise"
        )
    return lines


def _verification_lines(target: FunctionalModel) -> list[str]:
    """On accelerators, a line on the verification that was chosen."""
    platform, devices = jax.default_backend(), 1 if target.mesh is None else target.mesh.size
    if platform == "cpu":
        return []
    place = platform, target.config.vocab_size, device_of(target), devices
    return [verify.choice_line(target.execution.verify, *place)]


def mesh_lines(role: str, model: FunctionalModel) -> list[str]:
    """A line on what every device has whole, and one on KV heads that several have, if any.

    Args:
      role: "target" or "draft".
    """
    lines, copies = [], model.rules.kv_copies
    if model.mesh is not None and model.rules.replicated_axes:
        lines.append(_replicated_line(role, model, model.mesh.shape[TENSOR_AXIS]))
    if copies > 1:
        lines.append(
            f"each of the {model.config.num_kv_heads} key/value heads of the {role} is on {copies} "
            "devices, with a part of its query heads on each"
        )
    return lines


def loop_lines(role: str, model: FunctionalModel, platform: str) -> list[str]:
    """A line on products with experts that have no kernel on a platform, if there are any."""
    experts, execution = model.config.mechanisms.experts, model.execution
    if experts is None:
        return []
    hidden, channels = model.config.hidden_size, experts.intermediate
    if model.mesh is not None and model.rules.expert_ffn is not None:
        channels //= model.mesh.shape[TENSOR_AXIS]
    # On several devices groups of the down projection may be smaller.
    forms = [
        structs.form
        for structs in model.group_structs().values()
        if isinstance(structs, ExpertGroupStructs)
    ]
    form = max(forms, key=lambda form: form.group, default=None)
    matrices = [
        (outputs, inputs, execution.compute if form is None else device_form(form, inputs))
        for outputs, inputs in ((channels, hidden), (hidden, channels))
    ]
    reason = why_looped(execution.experts, platform, device_of(model), matrices)
    if reason is None:
        return []
    return [f"experts of the {role} are multiplied by XLA, one after the other: {reason}"]


def _replicated_line(role: str, model: FunctionalModel, count: int) -> str:
    sizes = {
        "vocab": model.config.vocab_size,
        "outputs": model.config.outputs,
        "heads": model.config.num_heads,
        "kv_heads": model.config.num_kv_heads,
        "ffn": " and ".join(map(str, model.config.channels)),
    }
    if model.config.mechanisms.experts is not None:
        sizes["expert_ffn"] = model.config.mechanisms.experts.intermediate
    names = ", ".join(f"{name} ({sizes[name]})" for name in model.rules.replicated_axes)
    return (
        f"every device of the {role} has all of {names}, which its {count} devices do not divide; "
        "give another number of devices"
    )
