"""The format that a `quantization_config` of a `config.json` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ssd_jax.checkpoints.quantized.awq import Awq
from ssd_jax.checkpoints.quantized.bitsandbytes import EightBits, FourBits
from ssd_jax.checkpoints.quantized.compressed_tensors import PackedRows
from ssd_jax.checkpoints.quantized.gptq import Gptq
from ssd_jax.checkpoints.quantized.mxfp4 import Mxfp4
from ssd_jax.checkpoints.quantized.scaled import Scaled
from ssd_jax.checkpoints.quantized.scheme import Scheme
from ssd_jax.errors import InputError
from ssd_jax.system.files import shown

_REMEDY = "use the unquantised model, or a GGUF file"


class _UnsupportedSettingError(Exception):
    """A setting, and its value, that no format here has."""


def scheme_of(config: Any, *, where: str) -> Scheme:
    """The format, by what `quantization_config` says.

    Raises:
      InputError: it is not supported, or a setting of it is not.
    """
    if not isinstance(config, Mapping):
        raise InputError(f"{where}: quantization_config = {shown(config)} is no object")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _SCHEMES:
        raise InputError(
            f"{where}: quantised with {shown(method)}, which is not supported; supported: "
            f"{', '.join(_SCHEMES)}; {_REMEDY}"
        )
    try:
        return _SCHEMES[method](config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: quantization_config is malformed: {error!r}") from None
    except _UnsupportedSettingError as error:
        setting, value = error.args
        raise InputError(
            f"{where}: quantised with {method}, whose {setting} = {shown(value)} is not supported; "
            f"{_REMEDY}"
        ) from None


def _one_of(config: Mapping[str, Any], key: str, values: tuple[Any, ...]) -> Any:
    if config.get(key) not in values:
        raise _UnsupportedSettingError(key, config.get(key))
    return config.get(key)


def _awq(config: Mapping[str, Any]) -> Scheme:
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise _UnsupportedSettingError("bits", bits)
    _one_of(config, "version", ("gemm", "GEMM", None))
    return Awq()


def _gptq(config: Mapping[str, Any]) -> Scheme:
    bits = _one_of(config, "bits", (2, 4, 8))
    version = _one_of(config, "checkpoint_format", ("gptq", "gptq_v2", None))
    for settings in (config.get("dynamic") or {}).values():  # of some modules
        for key in ("bits", "sym"):
            _one_of(settings, key, (config.get(key), None))
    offset = 0 if version == "gptq_v2" else 1
    return Gptq(bits, offset, symmetric=config.get("sym") is True)


def _float8(config: Mapping[str, Any]) -> Scheme:
    block = config.get("weight_block_size") or (1, 1)
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Scaled((rows, columns))
    raise _UnsupportedSettingError("weight_block_size", block)


def _modelopt(config: Mapping[str, Any]) -> Scheme:
    _one_of(config, "quant_algo", ("FP8",))
    return Scaled()


def _bitsandbytes(config: Mapping[str, Any]) -> Scheme:
    if config.get("load_in_8bit"):
        return EightBits()
    _one_of(config, "load_in_4bit", (True,))
    return FourBits()


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    groups = config.get("config_groups")
    _one_of(config.get("sparsity_config") or {}, "format", ("dense", None))
    if config.get("transform_config"):  # rotates activations, too
        raise _UnsupportedSettingError("transform_config", config["transform_config"])
    weights = [group.get("weights") for group in groups.values()] if groups else []
    if not weights or any(not weight for weight in weights):
        raise _UnsupportedSettingError("config_groups", groups)
    if _one_of(config, "format", tuple(_COMPRESSED)) == "pack-quantized":
        bits = {_one_of(weight, "num_bits", (4, 8)) for weight in weights}
        if len(bits) > 1:
            raise _UnsupportedSettingError("num_bits", sorted(bits))
        return PackedRows(bits.pop())
    for weight in weights:
        _one_of(weight, "num_bits", (8,))
    blocks = {_block(weight) for weight in weights}
    if len(blocks) > 1:
        raise _UnsupportedSettingError("block_structure", sorted(blocks))
    return Scaled(blocks.pop())


def _block(weight: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale, where it is not that of whole rows."""
    strategy = _one_of(weight, "strategy", ("tensor", "channel", "group", "block"))
    if strategy == "group":
        return 1, int(weight["group_size"])
    rows, columns = weight["block_structure"] if strategy == "block" else (1, 1)
    return int(rows), int(columns)


def _mxfp4(config: Mapping[str, Any]) -> Scheme:
    del config  # it only lists modules that are not quantised, whose arrays say so, too
    return Mxfp4()


_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_SCHEMES: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _float8,
    "fbgemm_fp8": _float8,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}
