"""Writes `tests/goldens/quantized/`: small matrices, quantised by the formats' libraries.

    python tests/oracle/make_quantized.py    # with torch, compressed-tensors and bitsandbytes

A file holds a module `m` as the library stores it, and `values`, what the library says it is.
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROWS, COLUMNS, GROUP = 32, 64, 32
EXPERTS = 8
FOLDER = Path(__file__).parents[1] / "goldens" / "quantized"


def write(name: str, values: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    separator = "_" if name == "mxfp4" else "."
    stored = {f"m{separator}{key}": tensor.contiguous() for key, tensor in tensors.items()}
    save_file({"values": values.float().contiguous(), **stored}, FOLDER / f"{name}.safetensors")


def write_awq() -> None:
    words = lambda *shape: torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)  # noqa: E731
    stored = {
        "qweight": words(COLUMNS, ROWS // 8),
        "qzeros": words(COLUMNS // GROUP, ROWS // 8),
        "scales": torch.rand(COLUMNS // GROUP, ROWS).half() / 50,
    }
    converter = AutoAWQConverter(group_size=GROUP)
    integers, scales, zeros = converter._convert_gemm_module(
        stored["qweight"], stored["scales"], stored["qzeros"]
    )
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP, symmetric=False)
    values = dequantize(integers, scales.float(), zeros, args=args)
    write("awq", values, stored)


def write_compressed(name: str, *, packed: bool = False, **settings: object) -> None:
    args = QuantizationArgs(**settings)
    matrix = torch.randn(ROWS, COLUMNS)
    shape = {
        "tensor": (1,),
        "channel": (ROWS, 1),
        "group": (ROWS, COLUMNS // GROUP),
        "block": (ROWS // 16, COLUMNS // 32),
    }[args.strategy]
    scales = torch.rand(shape) / 10 + 0.01
    zeros = None if args.symmetric else torch.randint(-8, 8, shape, dtype=torch.int8)
    integers = quantize(matrix, scales, zeros, args=args, dtype=args.pytorch_dtype())
    values = dequantize(integers, scales, zeros, args=args)
    stored = {"weight_scale": scales}
    if packed:
        stored["weight_packed"] = pack_to_int32(integers, args.num_bits)
        stored["weight_shape"] = torch.tensor(integers.shape)
        if zeros is not None:
            stored["weight_zero_point"] = pack_to_int32(zeros, args.num_bits, packed_dim=0)
    else:
        stored["weight"] = integers
        if zeros is not None:
            stored["weight_zero_point"] = zeros
    write(name, values, stored)


def write_bitsandbytes(kind: str, *, nested: bool) -> None:
    matrix = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
    packed, state = bnb.quantize_4bit(
        matrix, quant_type=kind, compress_statistics=nested, blocksize=64
    )
    stored = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    write(
        f"bitsandbytes_{kind}{'_nested' if nested else ''}",
        bnb.dequantize_4bit(packed, state),
        {"weight": packed, **stored},
    )


def write_int8() -> None:
    matrix = torch.randn(ROWS, COLUMNS, dtype=torch.float16)
    scales = matrix.float().abs().amax(1)
    integers = torch.round(matrix.float() * 127 / scales[:, None]).to(torch.int8)
    values = bnb.int8_vectorwise_dequant(integers, scales)
    write("bitsandbytes_int8", values, {"weight": integers, "SCB": scales})


def write_mxfp4() -> None:
    torch.manual_seed(0)  # so that the file does not depend on those before it
    blocks = torch.randint(0, 256, (EXPERTS, 8, COLUMNS // GROUP, GROUP // 2), dtype=torch.uint8)
    scales = torch.randint(110, 130, blocks.shape[:-1], dtype=torch.uint8)
    scales[0, 0] = torch.tensor([1, 250])
    values = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    write("mxfp4", values, {"blocks": blocks, "scales": scales})


def main() -> None:
    torch.manual_seed(0)
    FOLDER.mkdir(exist_ok=True)
    write_awq()
    groups = {"strategy": "group", "group_size": GROUP}
    write_compressed("packed4", packed=True, num_bits=4, symmetric=True, **groups)
    write_compressed("packed4_zeros", packed=True, num_bits=4, symmetric=False, **groups)
    write_compressed("packed8", packed=True, num_bits=8, symmetric=True, **groups)
    write_compressed("int8_rows", num_bits=8, symmetric=True, strategy="channel")
    write_compressed("int8_zeros", num_bits=8, symmetric=False, strategy="channel")
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    write_compressed("float8_tensor", strategy="tensor", **float8)
    write_compressed("float8_rows", strategy="channel", **float8)
    write_compressed("float8_blocks", strategy="block", block_structure=[16, 32], **float8)
    for kind in ("nf4", "fp4"):
        write_bitsandbytes(kind, nested=False)
    write_bitsandbytes("nf4", nested=True)
    write_int8()
    write_mxfp4()


if __name__ == "__main__":
    main()
