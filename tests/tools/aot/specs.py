"""A small decoder, and every program of a pair of it, by names such as "target forward 4"."""

from ssd_jax.devices.programs.program_spec import ProgramSpec
from ssd_jax.kernels.linear.api import stored_in_blocks
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.tools.aot import programs as aot_programs
from ssd_jax.tools.aot.programs import Sizes

K, BRANCHES, NODES = 4, 8, 15


def config(head_dim=64, **changes):
    """A small decoder with the vocabulary of a real one."""
    settings = {
        "family": "llama",
        "vocab_size": 128256,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "max_context": 131072,
        "tie_embeddings": True,
    }
    return ModelConfig(**settings | changes)


def programs(
    about: ModelConfig,
    *,
    platform="tpu",
    dtype="bfloat16",
    mesh=None,
    slots=4,
    context=2048,
    attention=None,
    paging=None,
    batches=(),
) -> dict[str, ProgramSpec]:
    """Those of a target and of a draft of the same architecture."""
    blocks = mesh is not None and stored_in_blocks(mesh.devices.flat[0])
    execution = Execution.for_platform(platform, dtype, attention=attention, blocks=blocks)
    model = FunctionalModel(about, execution, mesh=mesh)
    rooms = {"slots": slots, "context": context, "paging": paging, "batches": batches}
    sizes = Sizes(k=K, branches=BRANCHES, nodes=NODES, **rooms)
    found = {
        "target": aot_programs.of_target(model, sizes),
        "draft": aot_programs.of_draft(model, sizes),
    }
    return {
        " ".join(map(str, (role, *name))): spec
        for role, specs in found.items()
        for name, spec in specs.items()
    }
