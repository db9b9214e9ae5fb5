"""Programs that verify under the masks of a grammar, for requests that have one.

`masked_accept`, `masked_law`, `masked_accept_tree`, `masked_law_tree`: as the programs without
`masked_`, with masks [rows, w + 1, mask] as the last argument; see `sampling.masks`. Rounds
without a grammar do not run them and have no such argument. There is one variant of each, which can
do everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ssd_jax.devices.programs.first_rows import over_first_rows
from ssd_jax.devices.programs.program_spec import Name, ProgramSpec
from ssd_jax.devices.target import tree_programs
from ssd_jax.devices.target.logprob_programs import law_spec
from ssd_jax.devices.target.programs import Programs
from ssd_jax.sampling.variants import variant_name


def load(programs: Programs) -> None:
    """Compiles the programs that are not there yet; see `Programs.add`."""
    makers, variant = _row_makers(programs), programs.variants(programs.slots)[-1]
    tasks = *programs.widths, *(("tree",) if programs.verification.nodes else ())
    for task in tasks:
        names = _round_makers(programs, task).items()
        makers |= {variant_name(name, variant): make for name, make in names}
    missing = {name: make(programs) for name, make in makers.items() if name not in programs.names}
    if missing:
        programs.add("grammar", missing, _batch_specs)


_Makers = dict[Name, Callable[[Programs], ProgramSpec]]
"""What makes each program, of all slots or of the first ones."""


def _batch_specs(programs: Programs, part: Programs, task: int | str) -> dict[Name, ProgramSpec]:
    size, variant = part.local_slots, programs.variants(programs.slots)[-1]
    return {
        variant_name(programs.batch_name(name, size), variant): over_first_rows(
            make(programs), make(part), passed=["logits", "branches"]
        )
        for name, make in _round_makers(programs, task).items()
    }


def _row_makers(programs: Programs) -> _Makers:
    """Those for the end of a prompt."""
    variant = programs.variants(1)[-1]

    def accept(of: Programs) -> ProgramSpec:
        return of.accept_spec(1, 0, variant, masked=True)

    makers: _Makers = {variant_name(("masked_accept", 1, 0), variant): accept}
    if programs.verification.logprobs_of == "processed":
        law = variant_name(("masked_law", 1, 0), variant)
        makers[law] = partial(law_spec, count=1, proposed=0, variant=variant, masked=True)
    return makers


def _round_makers(programs: Programs, task: int | str) -> _Makers:
    """Those for the rounds of a task, see `batch_sizes`, by name without the variant."""
    variant = programs.variants(programs.slots)[-1]

    def accept(of: Programs) -> ProgramSpec:
        if isinstance(task, str):
            return tree_programs.accept_spec(of, variant, masked=True)
        return of.accept_spec(of.slots, task, variant, masked=True)

    def law(of: Programs) -> ProgramSpec:
        if isinstance(task, str):
            return tree_programs.law_spec(of, variant, masked=True)
        return law_spec(of, of.slots, task, variant, masked=True)

    kind, sizes = ("_tree", ()) if isinstance(task, str) else ("", (programs.slots, task))
    makers: _Makers = {(f"masked_accept{kind}", *sizes): accept}
    if programs.verification.logprobs_of == "processed":
        makers[f"masked_law{kind}", *sizes] = law
    return makers
