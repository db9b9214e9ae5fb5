"""What of kernels and programs has run, been interpreted or compiled where: `docs/support.md`.

`python -m tests.support` surveys every platform that this machine can reach (its own devices, and
chips that JAX's compilers know without having them), notes what became of each part in
docs/support.json, beside what other machines have noted there, and writes the page. Platforms may
be named, as in `python -m tests.support v5e h100`; with `--page` it writes the page alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ssd_jax import compat
from ssd_jax.devices.programs.program_spec import ProgramSpec
from ssd_jax.errors import InputError
from ssd_jax.kernels import kv_write
from ssd_jax.kernels.experts.api import ExpertBackend, backend_for, expert_products
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.head_shards import Kernels
from ssd_jax.kernels.kv_pages import Scratch
from ssd_jax.kernels.linear import cpu, packing
from ssd_jax.kernels.linear import xla as linear
from ssd_jax.kernels.linear.api import Packed
from ssd_jax.kernels.linear.quantized import quantize
from ssd_jax.kernels.tree_attention.api import BACKENDS, GPU_BACKENDS, tree_attention, why_not
from ssd_jax.kernels.tree_attention.variant import PLAIN
from ssd_jax.kernels.verify import api as verify_api
from ssd_jax.models.sharding import mesh_of
from ssd_jax.sampling.variants import VARIANTS
from ssd_jax.sampling.verification import verify
from ssd_jax.system.environment import cpu_model
from ssd_jax.tools.aot import chips
from tests.kernels import attention_cases as cases
from tests.kernels import expert_cases, expert_groups, verify_cases
from tests.tools.aot import specs

_DOCS = Path(__file__).parent.parent / "docs"
EVIDENCE, PAGE = _DOCS / "support.json", _DOCS / "support.md"
INTERPRETER = "interpreter"
COLUMNS = ("cpu", INTERPRETER, *chips.CHIPS)
"""Platforms of the page; devices that ran something and are none of these come behind them."""
STATES = {
    "failed": "does not compile, or gives something else",
    "lowered": "traced and lowered for the platform, not compiled",
    "compiled": "compiled by the platform's compiler, without a device",
    "interpreted": "run by JAX's interpreter of the kernel on a processor, equal to the reference",
    "ran": "run on the device, equal to the reference (kernels) or to a processor (programs)",
}
LAYOUT, TOLERANCE = (
    cases.Shapes(
        visible=((0, 0, 0), (300, 256, 1), (128, 127, 129)),
        kv_heads=2,
        page_size=128,
        branches=4,
        entries=3,
        dtype="bfloat16",
        seed=1,
    ),
    2e-2,
)


WIDE = dataclasses.replace(LAYOUT, head_dim=256)
"""Heads of which the kernels of accelerators hold fewer, or in pieces."""
VERIFIED = 1000
"""Tokens of the vocabulary of verifications."""
HEADS_OF_256 = ", heads of 256"
VERIFY_KERNELS = {"cpu": ("cpu",), "tpu": ("pallas_tpu",), "gpu": ("pallas_gpu",)}
"""Kernels of verification, by platform."""


EXPERT_KINDS = ("bfloat16", "int8 by rows", "mxfp4", "int4", "int8", "float8")
"""Kinds of experts' weights: but for the first two, in groups of inputs."""


class Note(NamedTuple):
    """What became of a part on a platform."""

    part: str
    platform: str
    state: str
    date: str
    versions: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where to compile, or to run.

    Attributes:
      name: as the page has it.
      platform: JAX's.
      mesh: of devices that are not there; None is this machine's own.
    """

    name: str
    platform: str
    mesh: Mesh | None = None

    @property
    def device(self) -> Any:
        """One of its devices."""
        return jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]

    def has(self, kernel: str) -> bool:
        """Whether its devices have the instructions of a kernel for their platform."""
        if kernel not in GPU_BACKENDS:
            return True
        from ssd_jax.kernels.tree_attention.pallas_gpu import why_not_on

        return why_not_on(self.device, kernel) is None

    def compile(self, function: Callable[..., Any], arguments: Any) -> jax.stages.Compiled:
        """For arguments like these."""
        sharding = self.mesh and NamedSharding(self.mesh, PartitionSpec())
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
        return jax.jit(function).lower(*like).compile()


def places(wanted: list[str]) -> Iterator[Place]:
    """Those that there are here, of those that are wanted; says what there is not."""
    platform = jax.default_backend()
    kind = "cpu" if platform == "cpu" else jax.devices()[0].device_kind
    if not wanted or kind in wanted:
        yield Place(kind, platform)
    for name, chip in chips.CHIPS.items():
        if wanted and name not in wanted:
            continue
        try:
            yield Place(name, chip.platform, mesh_of(chips.devices(name)))
        except InputError as error:
            print(f"{name}: not surveyed: {error}", file=sys.stderr)


# Kernels: a function of arrays, and what it must give.


def attention(
    backend: str, kernels: Kernels | None = None, layout: cases.Shapes = LAYOUT
) -> tuple[Callable[..., Any], Any]:
    """A backend of attention, and a case for it."""
    case = cases.make(layout)
    width = None if backend == "pallas_tpu" else 2 * layout.head_dim
    pages, branches = (
        cases.pack_kv(k, v) if width is None else jnp.concatenate([k, v], axis=-1)
        for k, v in ((case.k_pages, case.v_pages), (case.branch_k, case.branch_v))
    )

    def function(q, pages, table, visible, branches, paths, variant=PLAIN):
        options = {"backend": backend, "kernels": kernels, "variant": variant}
        return tree_attention(q, pages, table, visible, Scratch(branches, paths), **options)

    return function, (case.q, pages, case.table, case.visible, branches, case.paths)


def _wide_attention() -> np.ndarray:
    """What attention of heads of 256 must give."""
    reference, arguments = attention("reference", layout=WIDE)
    return np.asarray(reference(*arguments))


def compile_for_gpu(chip: str, operation: str, backend: str) -> None:
    """Compiles a kernel for GPUs, of which JAX takes those of one generation in a process."""
    place = Place(chip, "gpu", mesh_of(chips.devices(chip)))
    made = {
        "attention": attention,
        "wide attention": lambda name: attention(name, layout=WIDE),
        "verification": verification,
        **{f"experts, {kind}": partial(experts, kind) for kind in EXPERT_KINDS},
    }
    case = made[operation](backend)
    with jax.default_device(place.device):  # whose instructions Mosaic takes
        place.compile(*case)


def alone(function: Callable[..., None], *arguments: str) -> Callable[[], None]:
    """A call in a process of its own."""

    def run() -> None:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(function, *arguments).result()

    return run


def writing(windows: bool, kernels: Kernels | None = None) -> tuple[Callable[..., Any], Any]:
    """Writing rows of keys and values, and where."""
    rng = np.random.default_rng(0)
    pages = jnp.zeros((4, 2, 128, 128), jnp.bfloat16)
    table = np.array([[2, 0], [1, 3]], np.int32)
    positions = np.array([[126, 127, 128], [5, 6, 300]], np.int32)
    values = jnp.asarray(rng.standard_normal((2, 3, 2, 128)), jnp.bfloat16)

    def function(*arguments):
        return kv_write.write(*arguments, windows=windows, kernels=kernels)

    return function, (pages, table, positions, values)


def products(kind: str, *, packed: bool = False) -> tuple[Callable[..., Any], Any]:
    """Rows times a weight."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal((n, 256)), jnp.float32) for n in (4, 512))
    if not packed:
        return linear.product, (x, quantize(weight) if kind == "int8" else weight.astype(kind))
    pack = {"int8": lambda: packing.pack_int8(*quantize(weight))}
    panels = pack.get(kind, lambda: packing.pack_bfloat16(weight))()

    def function(x, panels):
        return cpu.products(x, [Packed(panels, kind, *weight.shape)])[0]

    return function, (x, panels)


def experts(kind: str, backend: str, interpret: Any = None) -> tuple[Callable[..., Any], Any]:
    """Rows times weights of the experts that they are sorted by."""
    case = expert_cases.make("few", "bfloat16", inputs=192)
    weight = jnp.asarray(case.weight)
    if kind in expert_groups.FORMS:
        form, count = expert_groups.FORMS[kind], len(case.sizes)
        weight, _ = expert_groups.made(form, count, expert_cases.OUTPUTS, 192)
    elif kind == "int8 by rows":
        weight = quantize(weight)

    def function(x, sizes, weight):
        [found] = expert_products(
            x, sizes, [weight], backend=ExpertBackend(backend, None, interpret)
        )
        return found

    return function, (case.x, case.sizes, weight)


def why_not_verified(place: Place) -> str | None:
    """Why GPUs do not verify by their kernel, in one line, or None."""
    return verify_api.why_not("pallas_gpu", "gpu", VERIFIED, place.device)


def verification(backend: str, how: Any = None) -> tuple[Callable[..., Any], Any]:
    """A backend of verification, interpreted in a context if one is given, and rows of all kinds
    for it."""
    case = verify_cases.arguments(verify_cases.KINDS, VERIFIED, 0, width=3)
    law = {"tokens": VERIFIED - 10, "parts": VARIANTS["truncated"], "backend": backend}

    def function(*arguments):
        with contextlib.nullcontext() if how is None else how():
            return verify(*arguments, **law)

    return function, jax.tree.map(jnp.asarray, case)


def kernels(place: Place) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Each kernel of a place: its name, the state that it has if all goes well, and a try."""
    single = place.mesh is None
    state = "ran" if single else "compiled"
    reference, arguments = attention("reference")
    wanted = np.asarray(reference(*arguments)) if single else None
    wide = _wide_attention() if single else None
    for name in (*BACKENDS, "pallas_tpu", *GPU_BACKENDS):
        if why_not(name, place.platform) is not None or not place.has(name):
            continue
        attempt = _try(place, *attention(name), wanted)
        if name in GPU_BACKENDS and not single:
            attempt = alone(compile_for_gpu, place.name, "attention", name)
        yield f"attention: {name}", state, attempt
        if name in BACKENDS:
            continue
        attempt = _try(place, *attention(name, layout=WIDE), wide)
        if name in GPU_BACKENDS and not single:
            attempt = alone(compile_for_gpu, place.name, "wide attention", name)
        yield f"attention: {name}{HEADS_OF_256}", state, attempt
    written = np.asarray(writing(windows=False)[0](*writing(windows=False)[1])) if single else None
    for name, windows in (("scatter", False), ("windows", True)):
        yield f"KV writes: {name}", state, _try(place, *writing(windows), written)
    if place.platform == "tpu":
        yield "KV writes: pallas_tpu", state, _try(place, *writing(True, Kernels()), written)
    right, given = verification("reference")
    outcome = jax.jit(right)(*given) if single else None
    for name in ("reference", "xla", *VERIFY_KERNELS.get(place.platform, ())):
        attempt = _try(place, *verification(name), outcome)
        if name == "pallas_gpu" and why_not_verified(place) is not None:
            continue
        if name == "pallas_gpu" and not single:
            attempt = alone(compile_for_gpu, place.name, "verification", name)
        yield f"verification: {name}", state, attempt
    of_platform = backend_for(place.platform, place.device).name
    for kind in EXPERT_KINDS:
        function, given = experts(kind, "xla")
        product_ = np.asarray(jax.jit(function)(*given)) if single else None
        for name in dict.fromkeys(("xla", of_platform)):
            attempt = _try(place, *experts(kind, name), product_)
            if name == "pallas_gpu" and not single:
                attempt = alone(compile_for_gpu, place.name, f"experts, {kind}", name)
            yield f"experts: {name}, {kind}", state, attempt
    for kind in ("bfloat16", "int8"):
        function, given = products(kind)
        product_ = np.asarray(function(*given)) if single else None
        yield f"products: xla, {kind}", state, _try(place, function, given, product_)
        if place.platform == "cpu" and why_missing() is None:
            packed = products(kind, packed=True)
            yield f"products: cpu, {kind}", state, _try(place, *packed, product_)


def interpreted() -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Kernels for accelerators, on whatever there is."""
    place = Place(INTERPRETER, "cpu")
    how = Kernels(interpret=pltpu.InterpretParams())
    reference, arguments = attention("reference")
    wanted = np.asarray(reference(*arguments))
    wide = _wide_attention()
    function = attention("pallas_tpu", how)
    yield "attention: pallas_tpu", "interpreted", _try(place, *function, wanted)
    function = attention("pallas_tpu", how, WIDE)
    yield f"attention: pallas_tpu{HEADS_OF_256}", "interpreted", _try(place, *function, wide)
    if compat.why_no_mosaic_gpu() is None:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        for name in GPU_BACKENDS:
            how_gpu = Kernels(interpret=plgpu.InterpretGPUParams())
            function = attention(name, how_gpu)
            yield f"attention: {name}", "interpreted", _try(place, *function, wanted)
            function = attention(name, how_gpu, WIDE)
            yield f"attention: {name}{HEADS_OF_256}", "interpreted", _try(place, *function, wide)
    for kind in EXPERT_KINDS:
        function, given = experts(kind, "xla")
        product_ = np.asarray(jax.jit(function)(*given))
        for_tpu = experts(kind, "pallas_tpu", pltpu.InterpretParams())
        yield f"experts: pallas_tpu, {kind}", "interpreted", _try(place, *for_tpu, product_)
        if compat.why_no_mosaic_gpu() is None:
            from jax.experimental.pallas import mosaic_gpu as plgpu

            for_gpu = experts(kind, "pallas_gpu", plgpu.InterpretGPUParams())
            yield f"experts: pallas_gpu, {kind}", "interpreted", _try(place, *for_gpu, product_)
    scatter, given = writing(windows=False)
    written = np.asarray(scatter(*given))
    yield "KV writes: pallas_tpu", "interpreted", _try(place, *writing(True, how), written)
    right, given = verification("reference")
    outcome = jax.jit(right)(*given)
    for_tpu = verification("pallas_tpu", pltpu.force_tpu_interpret_mode)
    yield "verification: pallas_tpu", "interpreted", _try(place, *for_tpu, outcome)
    if compat.why_no_clusters() is None:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        for_gpu = verification("pallas_gpu", plgpu.force_gpu_interpret_mode)
        yield "verification: pallas_gpu", "interpreted", _try(place, *for_gpu, outcome)


def _try(
    place: Place, function: Callable[..., Any], arguments: Any, wanted: Any
) -> Callable[[], None]:
    def run() -> None:
        compiled = place.compile(function, arguments)
        if wanted is not None:
            _compare(wanted, compiled(*arguments))

    return run


def _compare(wanted: Any, found: Any) -> None:
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if not jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_array_equal(other, one)
            continue
        one, other = one.astype(np.float32), other.astype(np.float32)
        scale = max(1.0, float(np.nanmax(np.abs(one), initial=0)))
        np.testing.assert_allclose(other, one, atol=TOLERANCE * scale)


# Programs.


def programs(place: Place) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Each program of a target and of a draft of a small model."""
    about = specs.config(vocab_size=1024) if place.mesh is None else specs.config(head_dim=128)
    found = specs.programs(about, platform=place.platform, mesh=place.mesh)
    for name, spec in found.items():
        if place.mesh is None:
            yield f"{name}", "ran", lambda spec=spec: _run(spec)
        else:
            yield f"{name}", "compiled", lambda spec=spec: _compiled(spec, place.mesh)


def _compiled(spec: ProgramSpec, mesh: Mesh | None) -> None:
    spec.compile(mesh)


def _run(spec: ProgramSpec) -> None:
    """On this machine's device, and beside it on a processor."""
    rng = np.random.default_rng(0)

    def some(struct: jax.ShapeDtypeStruct) -> np.ndarray:
        if jnp.issubdtype(struct.dtype, jnp.floating):
            values = 0.05 * rng.standard_normal(struct.shape)
            # Settings of sampling, one a row, are positive.
            return (abs(values) if struct.ndim == 1 else values).astype(struct.dtype)
        return np.zeros(struct.shape, struct.dtype)

    arguments = jax.tree.map(some, spec.arguments)
    found = spec.compile(None)(*arguments)
    for leaf in jax.tree.leaves(found):
        assert not np.isnan(np.asarray(leaf, np.float32)).any()  # a score may be none: -inf
    with jax.default_device(jax.devices("cpu")[0]):
        _compare(spec.compile(None)(*arguments), found)


# Notes and page.


def survey(wanted: list[str]) -> Iterator[Note]:
    """Tries everything; prints what fails, and goes on."""
    today = datetime.date.today().isoformat()
    tries: list[tuple[str, str, str, Callable[[], None]]] = []
    if not wanted or INTERPRETER in wanted:
        tries += [(INTERPRETER, *row) for row in interpreted()]
    for place in places(wanted):
        tries += [(place.name, *kernel) for kernel in (*kernels(place), *programs(place))]
    for platform, part, state, attempt in tries:
        try:
            attempt()
        except Exception as error:
            print(f"{part} on {platform}: {type(error).__name__}: {error}", file=sys.stderr)
            state = "failed"
        print(f"{platform}: {part}: {state}", flush=True)
        yield Note(part, platform, state, today, versions(platform))


def versions(platform: str) -> str:
    """Of what compiled for a platform."""
    found = [f"JAX {jax.__version__}", f"jaxlib {importlib.metadata.version('jaxlib')}"]
    compilers = {"libtpu": platform in chips.TPUS or "TPU" in platform}
    compilers["jax-cuda13-plugin"] = platform in chips.GPUS or "NVIDIA" in platform
    found += [f"{name} {importlib.metadata.version(name)}" for name in compilers if compilers[name]]
    if platform == "cpu":
        found.append(cpu_model() or "an unknown processor")
    return ", ".join(found)


def merged(old: list[Note], new: list[Note]) -> list[Note]:
    """New notes in place of old ones on the same part and platform."""
    notes = {(note.part, note.platform): note for note in (*old, *new)}
    return sorted(notes.values(), key=lambda note: (note.platform, note.part))


def read() -> list[Note]:
    """What is known."""
    return (
        [Note(*fields) for fields in json.loads(EVIDENCE.read_text())] if EVIDENCE.exists() else []
    )


def render(notes: list[Note]) -> str:
    """The page."""
    known = {(note.part, note.platform): note for note in notes}
    others = sorted({note.platform for note in notes} - {*COLUMNS})
    columns = [name for name in (*COLUMNS, *others) if any(n.platform == name for n in notes)]
    parts = sorted({note.part for note in notes})
    tables = {
        "Kernels": {part: [part] for part in parts if ":" in part},
        "Programs": _grouped(part for part in parts if ":" not in part),
    }
    had = {note.state for note in notes}
    lines = [
        "# What has run where",
        "",
        "Made by `make support`, which tries every part on every platform that a machine can "
        "reach;",
        "nothing here is typed. Programs are those of a target and a draft of a small model; those",
        "of real pairs are compiled by `make aot` ([aot.md](aot.md)).",
        "",
        *(f"- `{state}`: {what}" for state, what in STATES.items() if state in had),
        "",
    ]
    for title, rows in tables.items():
        rule = "|---" * (len(columns) + 1) + "|"
        lines += [f"## {title}", "", f"| | {' | '.join(columns)} |", rule]
        for row, members in rows.items():
            cells = [_cell([known.get((part, name)) for part in members]) for name in columns]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        lines.append("")
    lines += ["## When, with what", ""]
    for name in columns:
        of = sorted({(note.date, note.versions) for note in notes if note.platform == name})
        lines.append(f"- {name}: {'; '.join(f'{date}, {what}' for date, what in of)}")
    return "\n".join(lines) + "\n"


def _grouped(parts: Iterable[str]) -> dict[str, list[str]]:
    """Programs by role and name, whatever their sizes and variants."""
    groups: dict[str, list[str]] = {}
    for part in parts:
        groups.setdefault(" ".join(part.split()[:2]), []).append(part)
    return groups


def _cell(notes: list[Note | None]) -> str:
    """The least state of parts that are known."""
    there = [note.state for note in notes if note is not None]
    return min(there, key=[*STATES].index) if there else ""


def main(arguments: list[str]) -> None:
    """Surveys, or with --page only writes the page; one that is interrupted keeps its notes."""
    # JAX has as many threads then; an interpreted GPU kernel takes one for each of its own.
    jax.config.update("jax_num_cpu_devices", 8)
    notes = read()
    for note in survey(arguments) if arguments != ["--page"] else ():
        notes = merged(notes, [note])
        lines = ",\n".join(map(json.dumps, notes))
        EVIDENCE.write_text(f"[\n{lines}\n]\n")
    PAGE.write_text(render(notes))


if __name__ == "__main__":
    main(sys.argv[1:])
