"""Quantised matrices of safetensors files, as the libraries that define the formats read them."""

import json
import re
import shutil
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.quantized.registry import scheme_of
from ssd_jax.checkpoints.quantized.tensors import QuantizedTensors
from ssd_jax.checkpoints.weights.load import load_arrays
from ssd_jax.checkpoints.weights.native import has_groups, has_native, native_kinds
from ssd_jax.checkpoints.weights.safetensors import SafetensorsDirectory
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.kinds import KINDS
from ssd_jax.kernels.linear.reference import dense
from tests.checkpoints import tiny_models as tiny
from tests.checkpoints.float8 import quantise_float8, write_float8
from tests.checkpoints.gptq import packed, quantise
from tests.kernels.stored_rows import dequantized

GOLDENS = Path(__file__).parents[1] / "goldens" / "quantized"


def compressed(form, **weights):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


GROUPS = {"type": "int", "strategy": "group", "group_size": 32}
ROWS = {"num_bits": 8, "strategy": "channel"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
CONFIGS = {
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "packed4": compressed("pack-quantized", num_bits=4, **GROUPS),
    "packed4_zeros": compressed("pack-quantized", num_bits=4, **GROUPS),
    "packed8": compressed("pack-quantized", num_bits=8, **GROUPS),
    "int8_rows": compressed("int-quantized", **ROWS),
    "int8_zeros": compressed("int-quantized", **ROWS),
    "float8_tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "float8_rows": compressed("float-quantized", **ROWS),
    "float8_blocks": {"quant_method": "fp8", "weight_block_size": [16, 32]},
    "bitsandbytes_nf4": NF4,
    "bitsandbytes_fp4": NF4,
    "bitsandbytes_nf4_nested": NF4,
    "bitsandbytes_int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}
KINDS_BY_NAME = {
    **{"awq": "Q4_1", "packed4": "Q4_0", "packed4_zeros": "Q4_1", "packed8": "Q8_0"},
    "mxfp4": "MXFP4",
}
FLOAT8 = ("float8_tensor", "float8_rows")  # whose scales are those of blocks of 128 inputs


def opened(tmp_path, name):
    """The tensors of a golden, and what its matrix is."""
    shutil.copy(GOLDENS / f"{name}.safetensors", tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        values = file.get_tensor("values")
    stored = SafetensorsDirectory(tmp_path)
    return QuantizedTensors(stored, scheme_of(CONFIGS[name], where="here"), where="here"), values


@pytest.mark.parametrize("name", CONFIGS)
def test_a_matrix_is_what_the_library_reads_and_so_is_each_part_of_it(tmp_path, name):
    tensors, values = opened(tmp_path, name)
    assert tensors.shapes == {"m.weight": values.shape, "values": values.shape}
    assert tensors.shape("m.weight") == values.shape
    # Some libraries compute in 16 bits, which MXFP4 does not need.
    tolerance = 0 if name == "mxfp4" else 4e-3 if "nf4" in name or "fp4" in name else 1e-6
    read = tensors.read("m.weight")
    np.testing.assert_allclose(read, values, rtol=0, atol=tolerance * np.abs(values).max())
    for part in ((slice(5, 6),), (slice(3, 30), slice(7, 40)), (slice(0, 0),)):
        np.testing.assert_array_equal(tensors.read("m.weight", part), read[part])


@pytest.mark.parametrize("group", [-1, 2])
def test_a_group_that_is_not_there_is_named(tmp_path, group):
    arrays = load_file(GOLDENS / "packed4.safetensors")
    arrays["m.weight_g_idx"] = np.full(64, group, np.int32)
    save_file(arrays, tmp_path / "model.safetensors")
    scheme = scheme_of(CONFIGS["packed4"], where="here")
    tensors = QuantizedTensors(SafetensorsDirectory(tmp_path), scheme, where="here")
    with pytest.raises(InputError, match=r"'m' cannot be read: g_idx does not give a group of 2"):
        tensors.read("m.weight")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"m_scales": np.full((8, 8, 2), 255, np.uint8)}, "a scale is not a number"),
        ({"m_scales": np.zeros((8, 8, 1), np.uint8)}, "scales [8, 8, 1] beside blocks"),
        ({"m_blocks": np.zeros((8, 8, 2, 8), np.uint8)}, "beside blocks [8, 8, 2, 8]"),
    ],
)
def test_what_is_no_mxfp4_is_named(tmp_path, changed, message):
    arrays = load_file(GOLDENS / "mxfp4.safetensors") | changed
    save_file(arrays, tmp_path / "model.safetensors")
    stored, scheme = SafetensorsDirectory(tmp_path), scheme_of(CONFIGS["mxfp4"], where="here")

    def read():
        QuantizedTensors(stored, scheme, where="here").read("m.weight")

    with pytest.raises(InputError, match=f"'m' cannot be read: .*{re.escape(message)}"):
        read()


@pytest.mark.parametrize(("name", "kind"), KINDS_BY_NAME.items())
def test_integers_in_groups_stay_integers_in_blocks(tmp_path, name, kind):
    tensors, values = opened(tmp_path, name)
    assert tensors.stored_type("m.weight") == kind
    assert tensors.stored_type("values") == "bfloat16"
    blocks = tensors.read_blocks("m.weight")
    read = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    # Scales, and zeros times scales, have 11 bits there, where they are not powers of two.
    tolerance = 0 if kind == "MXFP4" else 2**-11 * 2
    np.testing.assert_allclose(read, values, rtol=0, atol=tolerance * np.abs(values).max())


@pytest.mark.parametrize("name", FLOAT8)
def test_floats_of_8_bits_stay_in_blocks_with_their_scales(tmp_path, name):
    tensors, values = opened(tmp_path, name)
    assert tensors.stored_type("m.weight") == "F8_E4M3"
    read = dequantized("F8_E4M3", tensors.read_blocks("m.weight"))
    np.testing.assert_array_equal(read[:, : values.shape[1]], tensors.read("m.weight"))
    np.testing.assert_array_equal(read[:, values.shape[1] :], 0)


@pytest.mark.parametrize("columns", [128, 256])
def test_blocks_of_8_bit_floats_are_cut_at_128_inputs(tmp_path, columns):
    rng = np.random.default_rng(0)
    floats = rng.normal(size=(40, 300)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random((3, -(-300 // columns))).astype(np.float32)
    write_float8(tmp_path, {"m.weight": floats, "m.weight_scale_inv": scales})
    config = {"quant_method": "fp8", "weight_block_size": [16, columns]}
    stored, scheme = SafetensorsDirectory(tmp_path), scheme_of(config, where="here")
    tensors = QuantizedTensors(stored, scheme, where="here")
    assert tensors.stored_type("m.weight") == "F8_E4M3"
    read = dequantized("F8_E4M3", tensors.read_blocks("m.weight"))
    spread = np.repeat(np.repeat(scales, 16, 0), columns, 1)[:40, :300]
    np.testing.assert_array_equal(read[:, :300], floats.astype(np.float32) * spread)


def test_scales_may_be_exponents(tmp_path):
    """As DeepSeek-V3.1 has them (ue8m0)."""
    floats = np.full((4, 256), 1.5, ml_dtypes.float8_e4m3fn)
    scales = np.array([[0.25, 2.0]], ml_dtypes.float8_e8m0fnu)
    write_float8(tmp_path, {"m.weight": floats, "m.weight_scale_inv": scales})
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stored, scheme = SafetensorsDirectory(tmp_path), scheme_of(config, where="here")
    tensors = QuantizedTensors(stored, scheme, where="here")
    np.testing.assert_array_equal(tensors.read("m.weight")[0, ::128], [0.375, 3.0])
    read = dequantized("F8_E4M3", tensors.read_blocks("m.weight"))
    np.testing.assert_array_equal(read, tensors.read("m.weight"))


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - KINDS_BY_NAME.keys() - {*FLOAT8}))
def test_other_types_are_named_where_they_have_no_products(tmp_path, name):
    tensors, _ = opened(tmp_path, name)
    assert not has_native(tensors)
    with pytest.raises(InputError, match=r"no products with .*'m.weight'.*dtype='bfloat16'"):
        native_kinds(tensors, where="here")


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("desc_act", [False, True])
def test_gptq_is_read(tmp_path, bits, version, desc_act):
    rng = np.random.default_rng(bits)
    inputs, outputs, groups, top = 64, 32, 2, 1 << bits
    integers = rng.integers(0, top, (inputs, outputs))
    zeros = rng.integers(0, top, (groups, outputs))
    scales = rng.random((groups, outputs)).astype(np.float16)
    order = rng.permutation(np.arange(inputs) % groups) if desc_act else np.arange(inputs) // 32
    stored_zeros = zeros if version == "gptq_v2" else (zeros - 1) % top
    stored = {
        "qweight": packed(integers, bits, 0),
        "qzeros": packed(stored_zeros, bits, 1),
        "scales": scales,
        "g_idx": order.astype(np.int32),
    }
    save_file({f"m.{key}": array for key, array in stored.items()}, tmp_path / "model.safetensors")
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}
    scheme = scheme_of(config | {"desc_act": desc_act}, where="here")
    tensors = QuantizedTensors(SafetensorsDirectory(tmp_path), scheme, where="here")
    values = ((integers - zeros[order]) * scales.astype(np.float64)[order]).T
    np.testing.assert_allclose(tensors.read("m.weight"), values, rtol=1e-6)
    np.testing.assert_allclose(tensors.read("m.weight", (slice(3, 9),)), values[3:9], rtol=1e-6)
    native = bits == 4 and not desc_act
    assert tensors.stored_type("m.weight") == ("Q4_1" if native else "GPTQ")
    if native:
        blocks = tensors.read_blocks("m.weight")
        read = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_1)
        np.testing.assert_allclose(read, values, atol=2**-11 * 30)


def test_the_order_of_groups_is_that_of_g_idx_whatever_desc_act_says(tmp_path):
    """Reading blocks by an order that the file has not would give other weights."""
    write_quantized(tmp_path, desc_act=False)
    arrays = load_file(tmp_path / "model.safetensors")
    order = np.repeat(np.array([1, 0], np.int32), 128)
    arrays["model.layers.0.mlp.up_proj.g_idx"] = order
    save_file(arrays, tmp_path / "model.safetensors")
    tensors = open_checkpoint(str(tmp_path)).tensors
    assert tensors.stored_type("model.layers.0.mlp.up_proj.weight") == "GPTQ"
    assert not has_native(tensors)


def test_biases_of_zeros_may_be_beside_quantised_matrices(tmp_path):
    """As AutoGPTQ wrote them for llama."""
    write_quantized(tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.bias"
    for value in (0, 1):
        arrays[name] = np.full(256, value, np.float16)
        save_file(arrays, tmp_path / "model.safetensors")
        if value:
            with pytest.raises(InputError, match=rf"the decoder has no place for tensor '{name}'"):
                open_checkpoint(str(tmp_path))
        else:
            open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "array", ["self_attn.k_proj.k_scale", "self_attn.v_scale", "self_attn.k_proj.output_scale"]
)
def test_scales_of_the_cache_are_left_out(tmp_path, array):
    write_quantized(tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    arrays[f"model.layers.0.{array}"] = np.ones(1, np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("scheme", "missing"), [("gptq", "qzeros"), ("gptq", "scales"), ("fp8", "weight_scale")]
)
def test_a_matrix_without_its_scales_is_named(tmp_path, scheme, missing):
    if scheme == "gptq":
        write_quantized(tmp_path)
        arrays = load_file(tmp_path / "model.safetensors")
        del arrays[f"model.layers.0.mlp.up_proj.{missing}"]
        save_file(arrays, tmp_path / "model.safetensors")
    else:
        tiny.write_hf(tmp_path)
        quantise_float8(tmp_path, (128, 128))
        text = (tmp_path / "model.safetensors").read_bytes()
        name = b"model.layers.0.mlp.up_proj.weight_scale_inv"
        (tmp_path / "model.safetensors").write_bytes(text.replace(name, name[:-1] + b"x"))
    with pytest.raises(InputError, match=rf"0.mlp.up_proj.*quantised, and '.*{missing}' is missin"):
        open_checkpoint(str(tmp_path))


def test_what_modelopt_writes_beside_the_configuration_says_how_matrices_are_quantised(tmp_path):
    tiny.write_hf(tmp_path)
    quantise_float8(tmp_path, (512, 512))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"has type F8_E4M3.*config.json has the quantization_con"):
        open_checkpoint(str(tmp_path))
    beside = tmp_path / "hf_quant_config.json"
    for algorithm in ("FP8", "NVFP4"):
        beside.write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
        if algorithm == "FP8":
            assert has_groups(open_checkpoint(str(tmp_path)).tensors)
        else:
            with pytest.raises(InputError, match="modelopt, whose quant_algo = 'NVFP4' is not"):
                open_checkpoint(str(tmp_path))


def write_quantized(directory, **config):
    """A tiny model whose matrices of layers are symmetric GPTQ; returns its tensors as floats."""
    tiny.write_hf(directory)
    return quantise(directory, group=128, **config)


def test_a_quantised_checkpoint_opens_as_the_model_that_it_is(tmp_path):
    floats = write_quantized(tmp_path)
    tensors = open_checkpoint(str(tmp_path)).tensors
    assert tensors.shapes == {name: array.shape for name, array in floats.items()}
    for name, array in floats.items():
        np.testing.assert_allclose(tensors.read(name), array, rtol=1e-6)


def test_its_matrices_are_packed_for_products_as_they_are(tmp_path):
    floats = write_quantized(tmp_path)
    tensors = open_checkpoint(str(tmp_path)).tensors
    assert has_native(tensors)
    kinds = native_kinds(tensors, where="here")
    name, head = "model.layers.1.mlp.down_proj.weight", "lm_head.weight"
    assert (kinds[name], kinds[head]) == ("Q4_0", "bfloat16")
    structs = {key: jax.ShapeDtypeStruct(tensors.shape(key), np.float32) for key in (name, head)}
    arrays = load_arrays(tensors, structs, where="here", native_kinds=kinds)
    for key in structs:
        panels = dense(KINDS[kinds[key]], np.asarray(arrays[key]), *tensors.shape(key))
        np.testing.assert_allclose(panels, floats[key], rtol=2**-8)


def test_settings_and_arrays_that_do_not_fit_are_named(tmp_path):
    write_quantized(tmp_path, sym=True, bits=3)
    with pytest.raises(
        InputError, match=r"config.json: quantised with gptq, whose bits = 3 is not"
    ):
        open_checkpoint(str(tmp_path))
    write_quantized(tmp_path, bits=8)
    with pytest.raises(InputError, match=r"q_proj.weight' has shape \(256, 128\), expected"):
        open_checkpoint(str(tmp_path))
    write_quantized(tmp_path, quant_method="awq")
    with pytest.raises(InputError, match=r"0.mlp.down_proj' cannot be read: scales \[4, 256\]"):
        open_checkpoint(str(tmp_path))
    floats = write_quantized(tmp_path, checkpoint_format="gptq_v2")
    with pytest.raises(InputError, match=r"the zeros are not half of the range"):
        open_checkpoint(str(tmp_path)).tensors.read_blocks("model.layers.0.mlp.up_proj.weight")
    tiny.write_hf(tmp_path, tensors=floats, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(InputError, match=r"no tensor is quantised, and config.json says so"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (3, "quantization_config = 3 is no object"),
        ({"quant_method": "hqq"}, "quantised with 'hqq', which is not supported; supported: awq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo = 'NVFP4'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size = "),
        (compressed("nvfp4-pack-quantized", num_bits=4), "format = 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", num_bits=3, **GROUPS), "num_bits = 3"),
        (
            compressed("pack-quantized", num_bits=4, **GROUPS)
            | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
            "transform_config = ",
        ),
        (
            compressed("float-quantized", **ROWS)
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "format = 'sparse-24-bitmask'",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}},
            "bits = 8",
        ),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups = "),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit = "),
        ({"quant_method": ["awq"]}, "quantised with ['awq'], which is not supported"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "_config is malformed"),
        (compressed("float-quantized", num_bits=8, strategy="group"), "_config is malformed"),
    ],
)
def test_formats_that_cannot_be_read_are_refused_by_name(config, message):
    with pytest.raises(InputError) as error:
        scheme_of(config, where="here")
    assert message in str(error.value)
