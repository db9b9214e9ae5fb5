"""`dtype = auto` follows how a checkpoint is stored."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ssd_jax import LLM
from ssd_jax.devices.opening import auto_dtype as module
from ssd_jax.devices.opening.auto_dtype import auto_dtype
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_gguf, tiny_models


def gguf_of(directory, kind):
    tensors = tiny_models.hf_tensors("llama")
    kinds = {name: kind for name, array in tensors.items() if array.ndim == 2}
    return str(tiny_gguf.write(directory / "model.gguf", "llama", tensors, types=kinds))


@pytest.fixture
def as_stored(monkeypatch):
    """Says whether quantised matrices are multiplied as they are."""

    def decide(possible):
        backend = "cpu" if possible else "xla"
        monkeypatch.setattr(module.products, "backend", lambda *_args, **_kw: backend)

    return decide


@pytest.mark.parametrize(
    ("kind", "possible", "dtype"),
    [
        ("Q8_0", True, "native"),
        ("Q4_0", True, "native"),
        ("Q8_0", False, "bfloat16"),
        ("F32", True, "float32"),
        ("F16", True, "bfloat16"),
        ("BF16", True, "bfloat16"),
    ],
)
def test_a_gguf_files_dtype_is_that_of_its_matrices(tmp_path, as_stored, kind, possible, dtype):
    as_stored(possible)
    assert auto_dtype(gguf_of(tmp_path, kind), None) == dtype


def test_auto_keeps_bfloat16_and_float32(tiny_checkpoint, tmp_path):
    assert auto_dtype(str(tiny_checkpoint), None) == "bfloat16"
    wide = tiny.write_checkpoint(tmp_path / "wide")
    tensors = load_file(wide / "model.safetensors")
    save_file(
        {name: t.astype(np.float32) for name, t in tensors.items()}, wide / "model.safetensors"
    )
    assert auto_dtype(str(wide), None) == "float32"


def test_a_model_has_the_dtype_that_was_found(tiny_checkpoint):
    with LLM(tiny_checkpoint, dtype="auto", context=64, load=False, compile_cache="off") as llm:
        assert (llm.config.dtype, llm.resolved.dtype) == ("auto", "bfloat16")
        plain = LLM(tiny_checkpoint, context=64, load=False, compile_cache="off")
        assert llm.target.model.execution == plain.target.model.execution
