"""Every program of a pair, as functions and shapes, not compiled."""

from __future__ import annotations

from unittest import mock

from ssd_jax.devices import passes
from ssd_jax.devices.draft_programs import Drafting, DraftPrograms
from ssd_jax.devices.expansion_programs import ExpansionPrograms
from ssd_jax.devices.passes import ProgramSpec
from ssd_jax.devices.target_programs import Programs, Verification
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel

K, BRANCHES, SUPPORT = 4, 8, 64


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
    about: ModelConfig, *, platform="tpu", dtype="bfloat16", mesh=None, slots=4, context=2048
) -> dict[str, ProgramSpec]:
    """Those of a target and of a draft of the same architecture, by "target forward 4"."""
    model = FunctionalModel(about, Execution.for_platform(platform, dtype), mesh=mesh)
    found = {}

    def take(specs, mesh, progress=None):
        found.update({(role, *name): spec for name, spec in specs.items()})
        return dict.fromkeys(specs)

    with mock.patch.object(passes, "compile_all", take):
        role, sizes = "target", {"slots": slots, "context": context, "tokens": about.vocab_size}
        Programs(model, **sizes, verification=Verification(widths=(0, K), support=SUPPORT))
        role = "draft"
        drafting = Drafting(
            k=K, support=SUPPORT, rule="ratio", branches=BRANCHES, predict="noise", confident=True
        )
        ExpansionPrograms(DraftPrograms(model, **sizes, drafting=drafting))
    return {" ".join(map(str, name)): spec for name, spec in found.items()}
