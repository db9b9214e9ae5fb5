"""Models with random weights."""

import jax
import numpy as np

from ssd_jax.checkpoints.weights.tensors import TensorSource
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of

LAYERS = 12


class Random(TensorSource):
    """Tensors of a model, made when they are read."""

    def __init__(self, model):
        self.shapes = {name: struct.shape for name, struct in model.checkpoint_structs().items()}

    def read_part(self, name, part):
        rng = np.random.default_rng(abs(hash(name)))
        return rng.normal(size=self.shapes[name]).astype(np.float32)[part]


def made(dtype, devices, layers=LAYERS):
    config = ModelConfig(
        family="qwen3", vocab_size=128, hidden_size=128, intermediate_size=512, num_layers=layers,
        num_heads=4, num_kv_heads=2, head_dim=32, rms_norm_eps=1e-5, rope_theta=1e4,
        max_context=512, tie_embeddings=True, qk_norm=True,
    )  # fmt: skip
    mesh = mesh_of(jax.devices()[:devices]) if devices else None
    return FunctionalModel(config, Execution.for_platform("tpu", dtype), mesh=mesh)
