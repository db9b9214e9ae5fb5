"""Experts' matrices in groups: as files have them, and as devices get them."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.weights.expert_groups import read_expert_groups
from ssd_jax.checkpoints.weights.grouped import float4_groups
from ssd_jax.checkpoints.weights.native import has_groups, native_groups
from ssd_jax.kernels.experts.groups import (
    ExpertGroups,
    ExpertGroupStructs,
    columns,
    dequantize,
    device_form,
    rows,
    scale_rows,
)
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from tests.checkpoints.tiny_gpt_oss import CHANNELS, EXPERTS, HIDDEN, METHOD, published, write

PREFIX = "model.layers.1.mlp.experts"
SHAPES = {
    f"{PREFIX}.gate_proj.weight": (CHANNELS, HIDDEN),
    f"{PREFIX}.up_proj.weight": (CHANNELS, HIDDEN),
    f"{PREFIX}.down_proj.weight": (HIDDEN, CHANNELS),
}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    path = tmp_path_factory.mktemp("mxfp4") / "m"
    write(path, published()[0], quantization_config=METHOD)
    return open_checkpoint(str(path)).tensors


def test_matrices_in_mxfp4_are_in_groups(tensors):
    forms = native_groups(tensors, where="here")
    assert has_groups(tensors)
    assert {*SHAPES} <= {*forms}
    assert {*forms.values()} == {GroupForm(FLOAT4, 32)}
    assert all(".mlp.experts." in name for name in forms)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("mesh", "spec"),
    [(None, None), (2, ("t", None, None)), (2, (None, None, "t")), (4, (None, "t", None))],
    ids=["whole", "experts", "outputs", "inputs"],
)
def test_devices_get_the_values_of_the_file(tensors, name, mesh, spec):
    outputs, inputs = SHAPES[name]
    count, of_outputs = (mesh if spec and spec[axis] else 1 for axis in (1, 2))
    part = outputs // of_outputs
    form = device_form(GroupForm(FLOAT4, 32), inputs // count)
    sharding = None
    if mesh:
        sharding = NamedSharding(Mesh(jax.devices()[:mesh], ("t",)), PartitionSpec(*spec))

    def struct(rows, dtype):
        shape = EXPERTS, rows, of_outputs * columns(part)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    structs = ExpertGroupStructs(
        struct(count * rows(form, inputs // count), "int32"),
        struct(count * scale_rows(form, inputs // count), "int32"),
        None,
        form,
    )
    found = read_expert_groups(tensors, name, structs)
    assert (found.values.shape, found.values.dtype) == (structs.values.shape, "int32")
    of_device = jax.jit(dequantize, static_argnums=1)

    def values(*place):
        parts = (
            np.split(np.split(np.asarray(x), count, axis=1)[place[0]], of_outputs, axis=2)[place[1]]
            for x in (found.values, found.scales)
        )
        weight = ExpertGroups(*parts, None, form.group, part)
        return np.asarray(of_device(weight, inputs // count), np.float32)

    blocks = [[values(i, j) for j in range(of_outputs)] for i in range(count)]
    dense = np.concatenate([np.concatenate(row, axis=2) for row in blocks], axis=1)
    np.testing.assert_array_equal(dense.swapaxes(1, 2), tensors.read(name))


def test_values_below_all_that_devices_have_are_zeros_and_large_ones_refused():
    codes = np.full((1, 2, 32), 7, np.uint8)
    found = float4_groups(codes, np.asarray([[0, 2]], np.uint8))
    assert found.scales.tolist() == [[2, 2]]
    assert found.values.tolist() == [[0] * 32 + [7] * 32]
    with pytest.raises(ValueError, match=r"a scale is 2\*\*126"):
        float4_groups(codes, np.asarray([[120, 253]], np.uint8))
