"""The page of `ssd-jax aot`: memory, programs, speeds, and one line that says what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ssd_jax.speculation.fan_out import FanOut
from ssd_jax.tools.aot.chips import Chip
from ssd_jax.tools.aot.modes import ACCEPTANCES, DeviceNeed, Mode, losses, size_verdict, verdict
from ssd_jax.tools.aot.parts import Compiled, ModelPart
from ssd_jax.tools.aot.programs import Sizes
from ssd_jax.tools.bench.table import Column, Page, build_table


class _Row(NamedTuple):
    part: ModelPart
    name: str
    program: Compiled


def build_page(
    modes: Sequence[Mode], chip: Chip, sizes: Sizes, fan_out: FanOut, *, title: str, where: str
) -> list[Page | str]:
    """Everything that is known about a pair: tables, and lines between them.

    Args:
      modes: all that were asked about.
      fan_out: divides the branches.
      title: says what was asked.
      where: the slice, in words.
    """
    refused = {str(mode): mode.refused(chip) for mode in modes}
    fitting = [mode for mode in modes if refused[str(mode)] is None]
    parts = list({id(part): part for mode in modes for part in mode.parts}.values())
    items: list[Page | str] = [f"{title}\n"]
    items += [_memory([need for mode in modes for need in mode.needs(chip)], chip), ""]
    rows = [_Row(p, " ".join(map(str, name)), c) for p in parts for name, c in p.programs.items()]
    if rows:
        items += [_programs(rows), ""]
    compiled = all(part.programs for mode in fitting for part in mode.parts)
    rates: list[list[float]] = []
    if fitting and compiled:
        rates = [[mode.rate(a, sizes, fan_out) for a in ACCEPTANCES] for mode in fitting]
        items += [_speeds(fitting, rates), ""]
    items += [f"{mode} does not fit: {why}" for mode, why in refused.items() if why]
    items += [f"{_where(part)}: {note}" for part in parts for note in part.notes]
    if rates and (line := losses(fitting, sizes, fan_out)) is not None:
        items.append(line)
    return [*items, verdict(fitting, rates, where) if compiled else size_verdict(fitting, where)]


def _where(part: ModelPart) -> str:
    return f"{part.role} on {len(part.devices)}"


def _memory(needs: Sequence[DeviceNeed], chip: Chip) -> Page:
    def of_programs(row: DeviceNeed, name: str) -> str | None:
        parts = row.need.parts
        return _gib(parts[name]) if parts["running"] or parts["code"] else None  # none compiled

    columns: list[Column[DeviceNeed]] = [
        Column("mode and devices", lambda row: row.need.memory, "left"),
        Column("weights", lambda row: _gib(row.need.parts["weights"])),
        Column("pages", lambda row: _gib(row.need.parts["pages"])),
        Column("while running", lambda row: of_programs(row, "running")),
        Column("programs", lambda row: of_programs(row, "code")),
        Column("all", lambda row: _gib(row.need.total)),
        Column("fits", lambda row: "yes" if row.fits else "no"),
    ]
    title = f"GiB of a device, which has {_gib(chip.memory)}"
    return build_table(columns, needs, title=title)


def _programs(rows: Sequence[_Row]) -> Page:
    columns: list[Column[_Row]] = [
        Column("model", lambda row: _where(row.part), "left"),
        Column("program", lambda row: row.name, "left"),
        Column("GFLOP", lambda row: f"{row.program.work.flops / 1e9:.1f}"),
        Column("MB moved", lambda row: f"{row.program.work.moved / 1e6:.0f}"),
        Column("collectives", lambda row: str(sum(c.runs for c in row.program.work.collectives))),
        Column("ms", lambda row: f"{1e3 * row.program.bounds.seconds:.2f}"),
        Column("bound by", lambda row: row.program.bounds.bound, "left"),
        Column("compiled in s", lambda row: f"{row.program.seconds:.1f}"),
    ]
    notes = (
        "at least: bytes over bandwidth or products over arithmetic, whichever is longer, and what "
        "devices send each other; the host and the start of every kernel come on top",
    )
    return build_table(columns, rows, title="one run of a program, on each device", notes=notes)


def _speeds(modes: Sequence[Mode], rates: Sequence[Sequence[float]]) -> Page:
    rows = list(zip(modes, rates, strict=True))
    columns: list[Column[tuple[Mode, Sequence[float]]]] = [
        Column("mode and devices", lambda row: str(row[0]), "left")
    ]
    for place, acceptance in enumerate(ACCEPTANCES):
        columns.append(Column(str(acceptance), lambda row, place=place: f"{row[1][place]:.0f}"))
    return build_table(
        columns,
        rows,
        title="tokens/s of all sequences, by how often a proposed token is accepted",
        notes=(
            "ssd: devices of the target + those of the draft, with the hit rates that are assumed "
            "before anything is observed (docs/tuning.md)",
        ),
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
