"""Models whose weights stay in groups: those that have them in bfloat16."""

import dataclasses

import jax
import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.weights import load
from ssd_jax.checkpoints.weights.grouped import StoredGroups
from ssd_jax.checkpoints.weights.native import native_groups
from ssd_jax.compat import keeps_int4
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.testing import tiny
from tests.checkpoints.float8 import quantise_float8
from tests.checkpoints.gptq import quantise
from tests.models.golden import Runner, parameters
from tests.selection import cases

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
TOKENS = np.random.default_rng(0).integers(0, tiny.TOKENS, (2, 9)).astype(np.int32)
PLACES = {
    "cpu": {},
    "tpu": {"scan_layers": True},
    "gpu": {"few_arrays": True, "scaled_sums": True, "min_rows": 8},
}


@pytest.fixture(scope="module", params=["gptq", "float8"])
def path(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny.write_checkpoint(directory, "qwen3", **SIZES)
    if request.param == "gptq":
        quantise(directory)
    else:
        quantise_float8(directory, (32, 64))
    return directory


def model_of(path, place, devices=1, **changes):
    """A model as on a platform, but for attention, with its weights in groups."""
    checkpoint = open_checkpoint(str(path))
    mesh = mesh_of(jax.devices()[:devices]) if devices > 1 else None
    execution = Execution.for_platform("cpu", "native", linear="xla", attention="xla")
    execution = dataclasses.replace(execution, **PLACES[place])
    settings = {"groups": native_groups(checkpoint.tensors, where="here")} | changes
    return checkpoint, FunctionalModel(checkpoint.config, execution, mesh=mesh, **settings)


def logits(checkpoint, model):
    return Runner(model, parameters(checkpoint, model), slots=2)(TOKENS)


@pytest.mark.parametrize("devices", cases([1, 2, 4], 2))
@pytest.mark.parametrize("place", PLACES)
def test_logits_are_those_of_the_weights_in_bfloat16(path, place, devices):
    checkpoint, model = model_of(path, place, devices)
    _, plain = model_of(path, place, devices, groups=None)
    assert len(model.group_structs()) == 14
    got, want = logits(checkpoint, model), logits(checkpoint, plain)
    # Sums that are scaled are those of values that nothing was rounded in.
    bound = 0.03 if place == "gpu" else 1e-3
    np.testing.assert_allclose(got, want, atol=bound * want.std())


def test_nothing_but_the_head_and_the_embedding_is_held_in_bfloat16(path):
    checkpoint, model = model_of(path, "tpu", 2)
    found = parameters(checkpoint, model)
    kinds = {}
    for (name, struct), array in zip(model._parameters.items(), found, strict=True):
        assert (array.shape, array.dtype) == (struct.shape, struct.dtype)
        assert array.sharding.is_equivalent_to(struct.sharding, array.ndim)
        kinds[name.removeprefix("model.layers.")] = array.dtype.name
    kind = ("int4" if keeps_int4() else "int8") if path.name.startswith("gptq") else "float8_e4m3fn"
    assert kinds["mlp.down_proj.weight"] == kinds["self_attn.q_proj.weight"] == kind
    assert kinds["mlp.down_proj.weight_scale"] == "float32"
    wide = [name for name, dtype in kinds.items() if dtype == "bfloat16"]
    assert sorted(wide) == ["lm_head.weight", "model.embed_tokens.weight"]


def test_groups_are_cut_where_devices_share_them(path):
    """Of 192 channels each of four devices has 48: groups of 32 or 64 become 16."""
    _, model = model_of(path, "tpu", 4)
    structs = dict(zip(model._parameters, model.parameter_structs(), strict=True))
    assert structs["model.layers.mlp.down_proj.weight"].shape[1:] == (192 // 16, 16, 128)
    assert structs["model.layers.mlp.down_proj.weight_scale"].shape[1:] == (192 // 16, 128)


def test_layers_of_one_loop_have_one_form_and_those_of_none_are_floats(path):
    name = "model.layers.1.mlp.up_proj.weight"
    forms = native_groups(open_checkpoint(str(path)).tensors, where="here")
    if forms[name].dtype == "int4":
        wider = forms | {name: GroupForm("int8", 16, minima=True)}
        _, model = model_of(path, "tpu", groups=wider)
        structs = model.group_structs()[name.replace("1", "0")]
        assert (structs.values.dtype, structs.values.shape) == ("int8", (8, 16, 192))
        assert structs.minima is not None
        assert model.ungrouped == 0
    del forms[name]
    checkpoint, model = model_of(path, "tpu", groups=forms)
    assert name.replace("1", "0") not in model.group_structs()
    assert model.ungrouped == 1
    _, plain = model_of(path, "tpu", groups=None)
    want = logits(checkpoint, plain)
    np.testing.assert_allclose(logits(checkpoint, model), want, atol=1e-3 * want.std())


@pytest.mark.parametrize("devices", [1, 2])
def test_scales_of_the_next_group_are_caught(path, devices, monkeypatch):
    checkpoint, model = model_of(path, "tpu", devices)
    want = logits(checkpoint, model)

    def shifted(groups, form, in_form=StoredGroups.in_form):
        found = in_form(groups, form)
        return found._replace(scales=np.roll(found.scales, 1, axis=1))

    monkeypatch.setattr(load.StoredGroups, "in_form", shifted)
    assert np.abs(logits(checkpoint, model) - want).max() > 0.05 * want.std()
