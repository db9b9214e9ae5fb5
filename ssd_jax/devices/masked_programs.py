"""Programs that verify under the masks of a grammar, for requests that have one.

`masked_accept`, `masked_law`, `masked_accept_tree`, `masked_law_tree`: as the programs without
`masked_`, with masks [rows, w + 1, mask] as the last argument; see `sampling.masks`. Rounds
without a grammar do not run them and have no such argument. There is one variant of each, which can
do everything.
"""

from __future__ import annotations

from ssd_jax.devices import target_tree_programs
from ssd_jax.devices.logprob_programs import law_spec
from ssd_jax.devices.program_spec import Name, ProgramSpec
from ssd_jax.devices.target_programs import Programs
from ssd_jax.sampling.variants import variant_name


def load(programs: Programs) -> None:
    """Compiles the programs that are not there yet; see `Programs.add`."""
    missing = {name: s for name, s in _specs(programs).items() if name not in programs.names}
    if missing:
        programs.add(missing)


def _specs(programs: Programs) -> dict[Name, ProgramSpec]:
    reports_law = programs.verification.logprobs_of == "processed"
    specs: dict[Name, ProgramSpec] = {}
    for size in [(1, 0), *((programs.slots, width) for width in programs.widths)]:
        variant = programs.variants(size[0])[-1]
        accept = programs.accept_spec(*size, variant, masked=True)
        specs[variant_name(("masked_accept", *size), variant)] = accept
        if reports_law:
            law = law_spec(programs, *size, variant, masked=True)
            specs[variant_name(("masked_law", *size), variant)] = law
    if programs.verification.nodes:
        variant = programs.variants(programs.slots)[-1]
        tree = target_tree_programs.accept_spec(programs, variant, masked=True)
        specs[variant_name(("masked_accept_tree",), variant)] = tree
        if reports_law:
            law = target_tree_programs.law_spec(programs, variant, masked=True)
            specs[variant_name(("masked_law_tree",), variant)] = law
    return specs
