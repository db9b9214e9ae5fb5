"""Models whose experts stay in groups: those that have them in bfloat16."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from safetensors.numpy import load_file, save_file

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.weights.grouped import StoredGroups
from ssd_jax.checkpoints.weights.native import native_groups
from ssd_jax.errors import InputError
from ssd_jax.kernels.experts.api import ExpertBackend
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_gpt_oss
from tests.checkpoints.float8 import quantise_float8
from tests.checkpoints.gptq import quantise
from tests.models.golden import ON_GPUS, ON_TPUS, Runner, parameters
from tests.selection import cases

TOKENS = np.random.default_rng(0).integers(0, tiny.TOKENS, (2, 9)).astype(np.int32)
PARTS = [(1, False), (2, False), (4, False), (2, True)]
"""Devices, and whether they share experts whole."""
PLACES = {"cpu": {}, "tpu": ON_TPUS, "gpu": ON_GPUS}
KERNEL = ExpertBackend("pallas_tpu", interpret=pltpu.InterpretParams())


def one_by_one(path, quantised):
    """A checkpoint of qwen3_moe whose experts are stored one by one, quantised."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    tiny.write_checkpoint(path, "qwen3_moe", hidden_size=64, norm_topk_prob=True, **sizes)
    stored = load_file(path / "model.safetensors")
    for name in [name for name in stored if ".experts." in name]:
        for expert, matrix in enumerate(stored.pop(name)):
            part = name.replace(".experts.", f".experts.{expert}.")
            stored[part] = np.ascontiguousarray(matrix)
    save_file(stored, path / "model.safetensors")
    quantised(path)
    return path


def mxfp4(path):
    path.rmdir()
    written = tiny_gpt_oss.published()[0]
    return tiny_gpt_oss.write(path, written, quantization_config=tiny_gpt_oss.METHOD)


KINDS = {
    "mxfp4": mxfp4,
    "gptq": lambda path: one_by_one(path, quantise),
    "float8": lambda path: one_by_one(path, lambda path: quantise_float8(path, (32, 32))),
}


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


def model_of(path, place, devices=1, *, changes=None, **settings):
    """A model as on a platform, with its weights in groups."""
    checkpoint = open_checkpoint(str(path))
    mesh = mesh_of(jax.devices()[:devices]) if devices > 1 else None
    execution = Execution.for_platform("cpu", "native", linear="xla", attention="xla")
    execution = dataclasses.replace(execution, **PLACES[place] | (changes or {}))
    settings = {"groups": native_groups(checkpoint.tensors, where="here")} | settings
    config = checkpoint.config.for_context(TOKENS.shape[1])
    return checkpoint, FunctionalModel(config, execution, mesh=mesh, **settings)


def logits(checkpoint, model):
    return Runner(model, parameters(checkpoint, model), slots=2)(TOKENS)


def close(got, want):
    return np.allclose(got, want, atol=2e-3 * want.std(), rtol=0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("devices", "expert_parallel"), cases(PARTS, *PARTS[:2], (2, True)))
def test_logits_are_those_of_the_weights_in_bfloat16(path, place, devices, expert_parallel):
    settings = {"expert_parallel": True} if expert_parallel else {}
    checkpoint, model = model_of(path, place, devices, **settings)
    _, plain = model_of(path, place, groups=None)
    assert close(logits(checkpoint, model), logits(checkpoint, plain))


def test_so_are_those_of_the_kernel_for_tpus(path):
    checkpoint, model = model_of(path, "tpu", changes={"experts": KERNEL})
    _, plain = model_of(path, "tpu", groups=None)
    assert close(logits(checkpoint, model), logits(checkpoint, plain))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_experts_are_held_in_the_bits_of_the_file(path, devices):
    checkpoint, model = model_of(path, "tpu", devices)
    found = parameters(checkpoint, model)
    kinds = {}
    for (name, struct), array in zip(model._parameters.items(), found, strict=True):
        assert (array.shape, array.dtype) == (struct.shape, struct.dtype)
        assert devices == 1 or array.sharding.is_equivalent_to(struct.sharding, array.ndim)
        kinds[name.removeprefix("model.layers.mlp.experts.")] = array
    down, scales = kinds["down_proj.weight"], kinds["down_proj.weight_scale"]
    if path.name.startswith("float8"):
        assert (down.dtype, scales.dtype) == ("float8_e4m3fn", "float32")
    else:
        exponents = path.name.startswith("mxfp4")
        assert (down.dtype, scales.dtype) == ("int32", "int32" if exponents else "float32")
    rows = 64 if down.dtype != "int32" else 8
    assert (down.shape[2:], scales.shape[2:]) == ((rows * devices, 128), (8 * devices, 128))


def test_a_part_of_a_group_of_eight_is_refused(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    tiny.write_checkpoint(tmp_path, "qwen3_moe", norm_topk_prob=True, **sizes)
    checkpoint = open_checkpoint(str(tmp_path))
    names = [name for name in checkpoint.tensors.shapes if ".experts." in name]
    with pytest.raises(InputError, match=r"a device has 12, .* give expert_parallel = true"):
        FunctionalModel(
            checkpoint.config,
            Execution.for_platform("tpu", "native"),
            mesh=mesh_of(jax.devices()[:4]),
            groups=dict.fromkeys(names, GroupForm(FLOAT4, 16)),
        )


def test_scales_of_the_next_group_are_seen(path, monkeypatch):
    checkpoint, plain = model_of(path, "tpu", groups=None)
    want = logits(checkpoint, plain)

    def rolled(groups, form, in_form=StoredGroups.in_form):
        found = in_form(groups, form)
        return found._replace(scales=np.roll(found.scales, 1, axis=1))

    monkeypatch.setattr(StoredGroups, "in_form", rolled)
    _, model = model_of(path, "tpu", 2)
    assert np.abs(logits(checkpoint, model) - want).max() > 0.05 * want.std()
