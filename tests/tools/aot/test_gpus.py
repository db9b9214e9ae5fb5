"""What the compiler for CUDA makes of every program, on a GPU that is not there."""

import dataclasses
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import jax
import pytest

from ssd_jax.devices.opening.sizes import bytes_per_device
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.errors import InputError
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.tools.aot import chips, hlo, traffic
from ssd_jax.tools.aot.configurations import read_configuration
from ssd_jax.tools.aot.programs import Sizes, of_target
from tests.tools.aot import gpus, specs
from tests.tools.aot.gates import loops_of_unknown_length

SLOTS, CONTEXT = 4, 32768  # pages are larger than whatever a program computes
LOGITS = SLOTS * specs.BRANCHES * 128256 * 4
PAGING = Paging(size=256, total=SLOTS * CONTEXT // 256)
CASES = {
    f"{name}{' by pages' if paging else ''}": (name, paging)
    for paging in (None, PAGING)
    for name in sorted(specs.programs(specs.config(vocab_size=1024), platform="gpu", paging=paging))
}
compiles = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.shipped,
    pytest.mark.skipif(bool(gpus.WHY), reason=str(gpus.WHY)),
]


def gates(program, module, pages):
    """Each gate by name: what is wrong, nothing where all is well."""
    found = {
        "no loop waits for the host": loops_of_unknown_length(module),
        "no conditional": [*module.instructions("conditional")],
        "no copy of the pages": [
            copy
            for copy in module.copies(1 << 20)
            if CONTEXT in copy.dims or {PAGING.total, PAGING.size} <= {*copy.dims}
        ],
        "no temporary of their size": program // (pages // 10 + 3 * LOGITS),
    }
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize("case", [pytest.param(case, marks=compiles, id=case) for case in CASES])
def test_a_program_passes_every_gate(case):
    name, paging = CASES[case]
    about = specs.config()
    mesh = mesh_of(chips.devices("h100"))
    settings = {"slots": SLOTS, "context": CONTEXT, "paging": paging}
    spec = specs.programs(about, platform="gpu", mesh=mesh, **settings)[name]
    began = time.process_time()
    compiled = spec.compile(mesh)
    print(f"{case}: {time.process_time() - began:.1f} s of a core")
    pages = about.num_layers * SLOTS * about.num_kv_heads * CONTEXT * 2 * about.head_dim * 2
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert gates(temporaries, hlo.read(compiled.as_text()), pages) == {}


EIGHT = [(width, name) for width in (0, 4) for name in ("pallas_gpu", "xla_static")]


@pytest.mark.parametrize(
    ("width", "attention"), [pytest.param(*size, marks=compiles, id=f"{size}") for size in EIGHT]
)
def test_a_forward_of_eight_devices_reads_weights_once_and_sends_no_table(width, attention):
    """Layers of a scan would be copied out of their stack, and one row is a slice of the table."""
    about, count = read_configuration("llama-3.1-8b"), 8
    mesh = mesh_of(chips.devices("h100", count))
    execution = Execution.for_platform("gpu", "bfloat16", attention=attention)
    model = FunctionalModel(about, execution, mesh=mesh)
    sizes = Sizes(slots=1, context=8192, k=4, branches=specs.BRANCHES)
    module = hlo.read(of_target(model, sizes)["forward", width].compile(mesh).as_text())
    weights = bytes_per_device(model.parameter_structs())
    moved = traffic.count(module, count).moved
    print(f"{moved / weights:.2f} times the weights")
    assert moved < 1.4 * weights
    assert max(collective.nbytes for collective in module.collectives()) < 1 << 20


OWN = [
    ("h100", "pallas_gpu", "target forward 4", 64),
    ("h100", "pallas_gpu", "target forward 4", 128),
    ("h100", "pallas_gpu", "target forward 4", 256),
    ("h100", "pallas_gpu", "draft expand 4 greedy", 64),
    ("h100", "pallas_gpu", "draft expand 4 greedy", 256),
    ("h100", "pallas_gpu", "target forward_tree", 128),
    ("h100", "pallas_gpu", "draft grow_tree greedy", 64),
    ("a100", "pallas_mma", "target forward 4", 64),
    ("a100", "pallas_mma", "draft expand 4 greedy", 128),
    ("a100", "pallas_mma", "draft expand 4 greedy", 256),
    ("h200", "pallas_mma", "target forward 4", 128),
    ("b200", "pallas_mma", "target forward 4", 256),
    ("b200", "pallas_mma", "target forward 4", 64),
]


def gates_of(chip, attention, name, head_dim):
    """What is wrong with a program with a kernel."""
    about = specs.config(head_dim)
    mesh = mesh_of(chips.devices(chip))
    settings = {"slots": SLOTS, "context": CONTEXT, "attention": attention}
    spec = specs.programs(about, platform="gpu", mesh=mesh, **settings)[name]
    with jax.default_device(mesh.devices.flat[0]):  # whose instructions Mosaic takes
        compiled = spec.compile(mesh)
    text = compiled.as_text()
    pages = about.num_layers * SLOTS * about.num_kv_heads * CONTEXT * 2 * about.head_dim * 2
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert "mosaic_gpu" in text
    return gates(temporaries, hlo.read(text), pages)


@pytest.mark.parametrize(
    ("chip", "attention", "name", "head_dim"),
    [pytest.param(*size, marks=compiles, id=f"{size}") for size in OWN],
)
def test_a_program_with_a_kernel_passes_every_gate(chip, attention, name, head_dim):
    """In a process of its own: JAX compiles kernels for one generation of GPUs in each."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(gates_of, chip, attention, name, head_dim).result() == {}


READS = {"greedy": 1.05, "sampled": 1.7, "truncated": 2.7}
"""How often `accept` may move its logits, at most, with the kernels of verification."""


def reads_of(chip, vocab, variant):
    """How often a program moves its logits, and its loops and conditionals."""
    about, slots, mesh = specs.config(vocab_size=vocab), 16, mesh_of(chips.devices(chip))
    execution = Execution.for_platform("gpu", "bfloat16")
    execution = dataclasses.replace(execution, verify="pallas_gpu")
    model = FunctionalModel(about, execution, mesh=mesh)
    sizes = Sizes(slots=slots, context=2048, k=specs.K, branches=specs.BRANCHES)
    with jax.default_device(mesh.devices.flat[0]):
        compiled = of_target(model, sizes)["accept", slots, specs.K, variant].compile(mesh)
    module = hlo.read(compiled.as_text())
    control = [*module.instructions("while"), *module.instructions("conditional")]
    moved = traffic.count(module, 1).moved
    return moved / (slots * (specs.K + 1) * vocab * 4), list(map(str, control))


@pytest.mark.parametrize(
    ("chip", "vocab", "variant"),
    [
        pytest.param(*case, marks=compiles, id=f"{case}")
        for case in [
            *(("h100", 128_256, variant) for variant in READS),
            ("h100", 151_937, "truncated"),  # rows that are not aligned
            ("h100", 262_144, "truncated"),
            ("h200", 151_936, "truncated"),
            ("b200", 151_936, "truncated"),
        ]
    ],
)
def test_kernels_of_verification_read_logits_a_few_times(chip, vocab, variant):
    """Against 27 times for truncated rows in plain XLA; nothing waits for the host."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        reads, control = pool.submit(reads_of, chip, vocab, variant).result()
    print(f"{chip}, {variant}: {reads:.2f} reads of the logits")
    assert 1 <= reads < READS[variant]
    assert control == []


FLAWS = {
    "no copy of the pages": f"%c = bf16[4,4,{CONTEXT},128]{{3,2,1,0}} copy(%p)",
    "no conditional": "%c = f32[] conditional(%p)",
    "no loop waits for the host": "%w = f32[] while(%p), condition=%none, body=%none",
    "": "%a = f32[] add(%p, %p)",
}


@pytest.mark.parametrize("gate", FLAWS)
def test_gates_of_gpus_fail_on_planted_faults(gate):
    none = "%none (p: f32[]) -> pred[] {\n  ROOT %r = pred[] parameter(0)\n}\n"
    module = hlo.read(f"{none}ENTRY %m (p: f32[]) -> f32[] {{\n  {FLAWS[gate]}\n}}\n")
    assert [*gates(0, module, 1 << 28)] == ([gate] if gate else [])
    assert "no temporary of their size" in gates(1 << 28, module, 1 << 28)


def test_gpus_that_cannot_be_compiled_for_are_refused(monkeypatch):
    with pytest.raises(InputError, match="devices = 9; give 1 to 8"):
        chips.devices("h200", 9)

    def missing(*_args, **_options):
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    with pytest.raises(InputError, match=r"no compiler for h100: Unknown backend.*cuda-aot"):
        chips.devices("h100")
