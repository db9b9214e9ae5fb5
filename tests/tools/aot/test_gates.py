"""What the compilers of accelerators make of every program, on chips that are not there.

`make aot` runs them; they need JAX 0.12 and libtpu. Those of real pairs are in `test_pairs.py`.
"""

import dataclasses

import jax
import numpy as np
import pytest

from ssd_jax.devices.programs.paged import Paging
from ssd_jax.kernels.kv_pages import lane_width
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.tools.aot import chips, hlo, traffic
from ssd_jax.tools.aot.programs import Sizes, of_target
from tests.tools.aot import gpus, specs
from tests.tools.aot.gates import loops_of_unknown_length

pytestmark = [pytest.mark.aot, pytest.mark.shipped]
of_every_program = pytest.mark.slow

SLOTS, CONTEXT = 4, 32768  # pages are larger than whatever a program computes
PAGING = Paging(size=256, total=SLOTS * CONTEXT // 256)
PAIRS = {
    "head 64": {"head_dim": 64},
    "head 80": {"head_dim": 80},
    "head 128, 4 devices": {"head_dim": 128, "devices": 4},
    "pages of 256": {"head_dim": 64, "paging": PAGING},
    "pages of 256, 2 x 2 devices": {"head_dim": 64, "devices": 4, "data": 2, "paging": PAGING},
    "a batch of 1": {"head_dim": 64, "batches": (1,)},
}


def names(paging=None, batches=(), **_rest):
    """Of the programs, or, where there are smaller batches, of these in one variant."""
    found = specs.programs(specs.config(vocab_size=1024), paging=paging, batches=batches)
    others = "greedy", "truncated", "full"
    return sorted(
        name for name in found if not batches or ("batch" in name and not name.endswith(others))
    )


def pair(head_dim, devices=1, data=1, paging=None, batches=()):
    """A mesh of v5e and programs for it by name, the bytes of their pages on a device, and two
    sizes that none but pages have."""
    about = specs.config(head_dim)
    mesh = mesh_of(chips.devices("v5e", devices), data)
    room = {"slots": SLOTS, "context": CONTEXT, "paging": paging, "batches": batches}
    found = specs.programs(about, mesh=mesh, **room)
    positions = SLOTS * CONTEXT * about.num_kv_heads // devices
    nbytes = about.num_layers * positions * lane_width(head_dim) * 2
    return mesh, found, nbytes, {paging.size if paging else CONTEXT, lane_width(head_dim)}


QUICK = {
    ("pages of 256, 2 x 2 devices", f"target forward {specs.K}"),
    ("pages of 256, 2 x 2 devices", "target forward_tree"),
    ("head 64", "target accept_tree sampled"),
    ("head 64", "draft begin_tree sampled"),
    ("head 128, 4 devices", "draft grow_tree sampled"),
    ("pages of 256, 2 x 2 devices", "draft promote_tree"),
    ("head 64", "draft expand_tree sampled"),
    ("head 128, 4 devices", "draft grow_branches sampled"),
    ("a batch of 1", "draft begin_tree batch 1 sampled"),
    ("a batch of 1", "draft promote_tree batch 1"),
    ("a batch of 1", "draft expand_tree batch 1 sampled"),
}
CASES = [
    pytest.param(case, marks=() if case in QUICK else of_every_program, id=", ".join(case))
    for about, settings in PAIRS.items()
    for name in names(**settings)
    for case in [(about, name)]
]


@pytest.fixture(scope="module", params=CASES)
def program(request):
    about, name = request.param
    mesh, found, nbytes, page = pair(**PAIRS[about])
    compiled = found[name].compile(mesh)
    # Branches off trees rank the continuations of so many rows that their logits are large, too.
    scale = 8 if "expand_tree" in name or "grow_branches" in name else 1
    return compiled, hlo.read(compiled.as_text()), nbytes, page, scale


def test_the_host_is_never_waited_for(program):
    _, module, *_ = program
    assert loops_of_unknown_length(module) == []
    assert [*module.instructions("conditional")] == []


def test_pages_are_changed_in_place(program):
    compiled, module, nbytes, page, scale = program
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * scale * nbytes
    copied = (copy for copy in module.copies(1 << 20) if page <= {*copy.dims})
    assert [array for array in copied if array.shape.lstrip("(").startswith("bf16")] == []


def test_neither_weights_nor_logits_travel(program):
    """Nothing larger than what a chunk of a prompt has in a layer, or logits of two positions."""
    _, module, *_, scale = program
    chunk = 512 * specs.config().hidden_size * 4 * scale
    assert [collective for collective in module.collectives() if collective.nbytes > chunk] == []


READS = {
    ("v5e", "greedy"): 1.3,
    ("v5e", "sampled"): 2.5,
    ("v5e", "truncated"): 2.5,
    ("v6e", "greedy"): 1.3,
    ("v6e", "sampled"): 2.5,
    ("v6e", "truncated"): 2.5,
    ("h100", "greedy"): 1.1,
    ("h100", "sampled"): 2.2,
    ("h100", "truncated"): 30,
}
"""How often `accept` may move its logits, at most (docs/results.md)."""


@pytest.mark.parametrize(
    ("chip", "variant"),
    [pytest.param(*case, marks=() if case in [*READS][:2] else of_every_program) for case in READS],
)
def test_logits_are_read_a_few_times(chip, variant):
    if chip not in chips.TPUS and gpus.WHY:
        pytest.skip(gpus.WHY)
    slots, mesh = 16, mesh_of(chips.devices(chip))
    about, platform = specs.config(), chips.chip_named(chip).platform
    found = specs.programs(about, platform=platform, mesh=mesh, slots=slots)
    spec = found[f"target accept {slots} {specs.K} {variant}"]
    moved = traffic.count(hlo.read(spec.compile(mesh).as_text()), 1).moved
    logits = slots * (specs.K + 1) * about.vocab_size * 4
    assert logits <= moved < READS[chip, variant] * logits


@pytest.mark.parametrize("chip", sorted(chips.TPUS))
def test_every_chip_has_a_compiler(chip):
    (device,) = chips.devices(chip)
    mesh = mesh_of([device])
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    struct = jax.ShapeDtypeStruct((8, 128), np.float32, sharding=everywhere)
    assert jax.jit(lambda x: x + 1).lower(struct).compile().as_text()


@pytest.mark.parametrize(
    "chip",
    [
        "v5e",
        *(pytest.param(name, marks=of_every_program) for name in chips.TPUS if name != "v5e"),
    ],
)
def test_a_target_on_one_tpu_reads_its_logits_in_kernels(chip):
    mesh = mesh_of(chips.devices(chip)[:1])
    execution = Execution.for_platform("tpu", "bfloat16")
    execution = dataclasses.replace(execution, verify="pallas_tpu")
    model = FunctionalModel(specs.config(128), execution, mesh=mesh)
    sizes = Sizes(slots=SLOTS, context=2048, k=specs.K, branches=specs.BRANCHES, paging=None)
    found = of_target(model, sizes)
    for variant in ("greedy", "sampled", "truncated"):
        compiled = found["accept", SLOTS, specs.K, variant].compile(mesh)
        logits = 4 * SLOTS * (specs.K + 1) * model.config.vocab_size
        assert compiled.memory_analysis().temp_size_in_bytes < logits / 4
        assert ("verify_draw" in compiled.as_text()) == (variant != "greedy")
