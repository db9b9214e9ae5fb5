from __future__ import annotations

import gguf
import numpy as np
import pytest

from ssd_jax.checkpoints.gguf.source import GGUFFile
from ssd_jax.checkpoints.gguf.tensors import SUPPORTED
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.kinds import GGML_KINDS
from tests.checkpoints import tiny_gguf
from tests.checkpoints import tiny_models as tiny

EMBED = "model.embed_tokens.weight"
ROWS, COLUMNS = tiny.VOCAB, tiny.HIDDEN


def random_rows(kind: str, rows: int, columns: int) -> np.ndarray:
    """Stored rows of random numbers; raw random blocks where gguf cannot quantise."""
    rng = np.random.default_rng(1)
    number = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(rng.normal(size=(rows, columns)).astype(np.float32), number)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[number]
        blocks = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
        scales = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (size - 2,)}[kind]
        for at in scales:  # random bits would include infinities
            half = rng.normal(size=(rows, columns // block, 1)).astype(np.float16)
            blocks[..., at : at + 2] = half.view(np.uint8)
        return blocks.reshape(rows, -1)


def opened(tmp_path, kind: str) -> tuple[GGUFFile, np.ndarray]:
    """A file whose embedding has this type, and gguf's own dequantisation of it."""
    stored = random_rows(kind, ROWS, COLUMNS)
    tensors = tiny.hf_tensors("llama", tied=True)
    del tensors[EMBED]
    raw = {"token_embd.weight": (stored, kind)}
    path = tiny_gguf.write(tmp_path / "model.gguf", "llama", tensors, raw=raw)
    return GGUFFile(path), gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_type_reads_as_gguf_itself_dequantises_it(tmp_path, kind):
    file, expected = opened(tmp_path, kind)
    assert expected.shape == (ROWS, COLUMNS)
    assert len(np.unique(expected)) > 16
    np.testing.assert_array_equal(file.read(EMBED).astype(np.float32), expected)


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize(
    "index",
    [
        (slice(3, 4),),
        (slice(5, 29), slice(None)),
        (slice(None), slice(128, 256)),
        (slice(7, 11), slice(33, 101)),  # not on a block's edge
        (slice(2, 2), slice(None)),
    ],
)
def test_a_slice_equals_that_part_of_the_whole(tmp_path, kind, index):
    file, expected = opened(tmp_path, kind)
    part = file.read(EMBED, index).astype(np.float32)
    np.testing.assert_array_equal(part, expected[index])


def test_slicing_rows_converts_only_those_rows(tmp_path, monkeypatch):
    file, _ = opened(tmp_path, "Q4_K")
    converted = []
    dequantize = gguf.quants.dequantize

    def counting(data, kind):
        values = dequantize(data, kind)
        converted.append(values.size)
        return values

    monkeypatch.setattr(gguf.quants, "dequantize", counting)
    file.read(EMBED, (slice(3, 5),))
    assert sum(converted) == 2 * COLUMNS


def test_tensors_do_not_alias_the_file(tmp_path):
    file, _ = opened(tmp_path, "F32")
    first = file.read(EMBED)
    assert first.flags.writeable
    first[:] = 0
    assert np.any(file.read(EMBED) != 0)


def test_an_unsupported_type_is_named_with_the_tensor_and_the_supported_ones(tmp_path):
    stored = np.zeros((ROWS, 84), np.uint8)
    with pytest.raises(InputError) as error:
        GGUFFile(
            tiny_gguf.write(
                tmp_path / "model.gguf", "llama", {}, raw={"token_embd.weight": (stored, "Q2_K")}
            )
        )
    for part in ("token_embd.weight", "Q2_K", *SUPPORTED):
        assert part in str(error.value)
    assert f"(with `dtype='native'` {', '.join(GGML_KINDS)})" in str(error.value)
