"""Matrices in groups are the values of their files, whatever form holds them."""

import shutil

import numpy as np
import pytest

from ssd_jax.checkpoints.gguf.source import GGUFFile
from ssd_jax.checkpoints.quantized.registry import scheme_of
from ssd_jax.checkpoints.quantized.tensors import QuantizedTensors
from ssd_jax.checkpoints.weights.grouped import StoredGroups, form_of_kind, from_blocks
from ssd_jax.checkpoints.weights.native import has_groups, native_groups
from ssd_jax.checkpoints.weights.safetensors import SafetensorsDirectory
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from ssd_jax.kernels.linear.kinds import E2M1, GGML_KINDS
from tests.checkpoints import tiny_gguf
from tests.checkpoints import tiny_models as tiny
from tests.checkpoints.test_quantized import CONFIGS, GOLDENS
from tests.kernels.stored_rows import dequantized, random_blocks

FORMS = {
    "awq": GroupForm("int4", 32, minima=True),
    "packed4": GroupForm("int4", 32),
    "packed4_zeros": GroupForm("int4", 32, minima=True),
    "packed8": GroupForm("int8", 32),
    "int8_rows": GroupForm("int8", 64),
    "int8_zeros": GroupForm("int8", 64, minima=True),
    "float8_tensor": GroupForm("float8_e4m3fn", 64),
    "float8_rows": GroupForm("float8_e4m3fn", 64),
    "float8_blocks": GroupForm("float8_e4m3fn", 32),
}
OF_EXPERTS = {"mxfp4": GroupForm(FLOAT4, 32)}
"""Those of matrices that only experts may have."""


def values(groups: StoredGroups) -> np.ndarray:
    """In float64, in which nothing is rounded."""
    spread = groups.values.shape[1] // groups.scales.shape[1]
    numbers, scales = groups.values.astype(np.float64), groups.scales
    if scales.dtype == np.uint8:  # MXFP4
        numbers, scales = np.asarray(E2M1)[groups.values], np.exp2(scales - 127.0)
    found = numbers * np.repeat(scales, spread, axis=1)
    return found if groups.minima is None else found + np.repeat(groups.minima, spread, axis=1)


@pytest.mark.parametrize("kind", [kind for kind in GGML_KINDS if form_of_kind(kind)])
def test_blocks_of_ggml_are_the_values_that_gguf_dequantises(kind):
    blocks = random_blocks(kind, 7, 512)
    groups, form, want = from_blocks(kind, blocks), form_of_kind(kind), dequantized(kind, blocks)
    assert form is not None
    np.testing.assert_allclose(values(groups), want, atol=1e-6 * np.abs(want).max())
    assert groups.scales.shape == (7, 512 // form.group)
    assert (groups.minima is not None) == form.minima
    bounds = (-8, 7) if form.dtype == "int4" else (-128, 127)
    assert bounds[0] <= groups.values.min() < groups.values.max() <= bounds[1]


@pytest.mark.parametrize(
    ("form", "wider"),
    [
        (GroupForm("int4", 64), GroupForm("int8", 32, minima=True)),
        (GroupForm("int4", 32, minima=True), GroupForm("int4", 16, minima=True)),
        (GroupForm("float8_e4m3fn", 128), GroupForm("float8_e4m3fn", 32)),
    ],
)
def test_another_form_holds_the_same_values(form, wider):
    rng = np.random.default_rng(0)
    scales, minima = rng.normal(size=(2, 5, 128 // form.group)).astype(np.float32)
    groups = StoredGroups(
        rng.integers(-8, 8, (5, 128)).astype(form.dtype), scales, minima if form.minima else None
    ).in_form(form)
    found = groups.in_form(wider)
    assert found.values.dtype == wider.dtype
    assert found.scales.shape == (5, 128 // wider.group)
    assert (found.minima is not None) == wider.minima
    np.testing.assert_array_equal(values(found), values(groups))


def test_forms_join_where_one_holds_both():
    four, eight = GroupForm("int4", 128), GroupForm("int8", 16, minima=True)
    assert four.joined(four) == four
    assert four.joined(eight) == eight.joined(four) == GroupForm("int8", 16, minima=True)
    assert four.joined(GroupForm("int4", 96, minima=True)) == GroupForm("int4", 32, minima=True)
    assert four.joined(GroupForm("float8_e4m3fn", 128)) is None
    assert four.divided(64 * 3) == GroupForm("int4", 64)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantised_matrix_is_in_groups_if_its_format_has_these(tmp_path, name):
    shutil.copy(GOLDENS / f"{name}.safetensors", tmp_path / "model.safetensors")
    stored, scheme = SafetensorsDirectory(tmp_path), scheme_of(CONFIGS[name], where="here")
    tensors = QuantizedTensors(stored, scheme, where="here")
    assert tensors.group_form("m.weight") == (FORMS | OF_EXPERTS).get(name)
    assert tensors.group_form("values") is None
    assert has_groups(tensors) == (name in FORMS)
    if name not in FORMS:
        with pytest.raises(InputError, match=r"'m.weight' is .* without these; give `dtype="):
            native_groups(tensors, where="here")
        return
    assert native_groups(tensors, where="here") == {"m.weight": FORMS[name]}
    want = tensors.read("m.weight")
    for rows in (slice(0, len(want)), slice(3, 9)):
        found = values(tensors.read_groups("m.weight", rows))
        np.testing.assert_allclose(found, want[rows], atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rows_of_a_gguf_file_are_in_their_order(tmp_path, family):
    tensors = tiny.hf_tensors(family)
    names = [name for name, array in tensors.items() if array.ndim == 2]
    types = dict.fromkeys(names, "Q4_0") | {"lm_head.weight": "F16"}
    file = GGUFFile(tiny_gguf.write(tmp_path / "m.gguf", family, tensors, types=types))
    assert native_groups(file, where="here").keys() == {*names} - {"lm_head.weight"}
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        want = file.read(name)
        for rows in (slice(0, len(want)), slice(5, 40)):
            np.testing.assert_array_equal(values(file.read_groups(name, rows)), want[rows])


def test_what_is_not_quantised_is_refused(tmp_path):
    tiny.write_hf(tmp_path)
    tensors = SafetensorsDirectory(tmp_path)
    assert not has_groups(tensors)
    with pytest.raises(InputError, match="here is not quantised"):
        native_groups(tensors, where="here")
