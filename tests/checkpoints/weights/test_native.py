from __future__ import annotations

import gguf
import jax
import numpy as np
import pytest

from ssd_jax import LLM
from ssd_jax.checkpoints.drafts.shipped import shipped_drafts
from ssd_jax.checkpoints.gguf.source import GGUFFile
from ssd_jax.checkpoints.opening import dtype_of_draft
from ssd_jax.checkpoints.weights.load import load_arrays
from ssd_jax.checkpoints.weights.native import has_native, native_kinds
from ssd_jax.checkpoints.weights.safetensors import SafetensorsDirectory
from ssd_jax.config.config import Config
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.kinds import GGML_KINDS, KINDS, STORED_KINDS
from ssd_jax.kernels.linear.reference import dense
from ssd_jax.loading import resolve
from tests.checkpoints import tiny_gguf
from tests.checkpoints import tiny_models as tiny
from tests.checkpoints.gptq import quantise
from tests.kernels.stored_rows import random_blocks

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def matrices(tied: bool = False) -> list[str]:
    return [name for name, array in tiny.hf_tensors("llama", tied=tied).items() if array.ndim == 2]


def written(tmp_path, *, family="llama", tied=False, **types: str):
    """A file whose matrices are Q8_0, or of the type named by the last part of their name."""
    tensors = tiny.hf_tensors(family, tied=tied)
    kinds = dict.fromkeys(matrices(tied), "Q8_0")
    for part, kind in types.items():
        kinds |= {name: kind for name in kinds if f"{part}." in name}
    return tiny_gguf.write(tmp_path / "model.gguf", family, tensors, types=kinds)


def test_a_file_says_the_type_of_every_tensor_and_other_formats_say_none(tmp_path):
    file = GGUFFile(written(tmp_path, q_proj="Q4_0", down_proj="F16"))
    assert file.stored_type(Q_PROJ) == "Q4_0"
    assert file.stored_type(K_PROJ) == "Q8_0"
    assert file.stored_type("model.layers.0.mlp.down_proj.weight") == "F16"
    assert file.stored_type("model.norm.weight") == "F32"
    tiny.write_hf(tmp_path / "hf")
    other = SafetensorsDirectory(tmp_path / "hf")
    assert {other.stored_type(name) for name in other.shapes} == {None}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", [Q_PROJ, K_PROJ, O_PROJ, EMBED])
def test_blocks_are_in_the_order_of_the_rows_that_are_read(tmp_path, family, name):
    tensors = tiny.hf_tensors(family)
    path = tiny_gguf.write(tmp_path / "m.gguf", family, tensors, types={name: "Q5_1"})
    file = GGUFFile(path)
    blocks = file.read_blocks(name)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q5_1)
    np.testing.assert_array_equal(values, file.read(name))
    assert np.corrcoef(values.ravel(), tensors[name].ravel())[0, 1] > 0.99


def test_kinds_are_those_of_the_file(tmp_path):
    file = GGUFFile(written(tmp_path, q_proj="Q4_1", embed_tokens="Q5_0"))
    kinds = native_kinds(file, where="here")
    assert kinds.keys() == set(matrices())
    assert kinds[Q_PROJ] == "Q4_1"
    assert kinds[EMBED] == "Q5_0"
    assert kinds[HEAD] == "Q8_0"
    assert has_native(file)


@pytest.mark.parametrize("kind", ["F16", "F32"])
def test_a_type_without_products_is_named_with_what_there_is_and_what_to_do(tmp_path, kind):
    file = GGUFFile(written(tmp_path, o_proj=kind))
    with pytest.raises(InputError) as error:
        native_kinds(file, where="here.gguf")
    message = str(error.value)
    for part in ("here.gguf", kind, "layers.0.self_attn.o_proj", "Q8_0", *STORED_KINDS):
        assert part in message
    assert "`dtype='bfloat16'`" in message
    assert not has_native(file)


def test_experts_are_packed_as_their_file_has_them(tmp_path):
    """All but what chooses among them, which stays float32."""
    kind, name = KINDS["MXFP4"], "model.layers.0.mlp.experts.gate_proj.weight"
    blocks = np.stack([random_blocks("MXFP4", 40, tiny.HIDDEN, seed) for seed in range(3)])
    raw = {
        "blk.0.ffn_gate_exps.weight": (blocks, "MXFP4"),
        "blk.0.ffn_gate_inp.weight": (np.ones((3, tiny.HIDDEN), np.float32), "F32"),
        "output.weight": (random_blocks("Q8_0", tiny.VOCAB, tiny.HIDDEN), "Q8_0"),
    }
    sizes = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 40}
    embedding = {EMBED: np.zeros((tiny.VOCAB, tiny.HIDDEN), np.float32)}
    keys = tiny_gguf.metadata("qwen3moe", **sizes)
    file = GGUFFile(tiny_gguf.write(tmp_path / "m.gguf", "qwen3moe", embedding, keys=keys, raw=raw))
    assert has_native(file)
    kinds = native_kinds(file, where="here")
    assert kinds == {name: "MXFP4", HEAD: "Q8_0"}
    structs = {name: jax.ShapeDtypeStruct(file.shape(name), np.float32)}
    panels = load_arrays(file, structs, where="here", native_kinds=kinds)[name]
    values = dense(kind, np.asarray(panels), 3 * 64, tiny.HIDDEN).reshape(3, 64, tiny.HIDDEN)
    np.testing.assert_array_equal(values[:, :40], file.read(name))


def test_a_checkpoint_without_stored_types_is_refused(tmp_path):
    tiny.write_hf(tmp_path / "hf")
    message = r"hf is not quantised, .* \(Q4_0, .*give `dtype='bfloat16'`"
    with pytest.raises(InputError, match=message):
        native_kinds(SafetensorsDirectory(tmp_path / "hf"), where="hf")


@pytest.mark.parametrize(
    "given",
    [
        {"target": "hf:org/name", "dtype": "native"},
        {"target": "x.gguf", "mode": "sd", "draft": "hf:org/name", "draft_dtype": "native"},
    ],
)
def test_a_repository_of_the_hub_is_refused_before_it_is_downloaded(given):
    with pytest.raises(InputError, match=r"^hf:org/name: dtype = 'native' needs quantised weights"):
        Config(**given)
    Config(**(given | {"dtype": "native", "target": "x.gguf", "draft_dtype": None}))


def test_rows_that_are_merely_looked_up_may_have_any_type(tmp_path):
    assert has_native(GGUFFile(written(tmp_path, embed_tokens="F16")))
    assert not has_native(GGUFFile(written(tmp_path, tied=True, embed_tokens="F16")))
    assert not has_native(GGUFFile(written(tmp_path, lm_head="F16")))


@pytest.mark.parametrize("kind", GGML_KINDS)
def test_panels_hold_what_the_file_holds(tmp_path, kind):
    blocks = random_blocks(kind, tiny.VOCAB, tiny.HIDDEN)
    tensors = tiny.hf_tensors("llama", tied=True)
    del tensors[EMBED]
    raw = {"token_embd.weight": (blocks, kind)}
    types = dict.fromkeys(matrices(tied=True), "Q8_0")
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", tensors, types=types, raw=raw)
    file = GGUFFile(path)
    stored = native_kinds(file, where="here")
    assert stored[EMBED] == kind
    assert stored[Q_PROJ] == "Q8_0"
    wanted = {
        name: jax.ShapeDtypeStruct(file.shape(name), np.float32)
        for name in (EMBED, Q_PROJ, "model.norm.weight")
    }
    arrays = load_arrays(file, wanted, where="here", native_kinds=stored)
    for name, of in ((EMBED, KINDS[kind]), (Q_PROJ, KINDS["Q8_0"])):
        panels = np.asarray(arrays[name])
        assert panels.shape == of.packed_shape(*file.shape(name))
        np.testing.assert_array_equal(dense(of, panels, *file.shape(name)), file.read(name))
    assert arrays["model.norm.weight"].dtype == np.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_other_dtypes_are_the_drafts_too_and_nothing_is_looked_at(dtype):
    assert dtype_of_draft("no such file", dtype, platform="gpu") == dtype


def test_a_draft_is_native_where_its_file_can_be(tmp_path):
    def found(source):
        return dtype_of_draft(str(source), "native", platform="cpu")

    assert found(written(tmp_path)) == "native"
    assert found(tmp_path) == "native"
    assert found(written(tmp_path, k_proj="F16")) == "int8"
    tiny.write_hf(tmp_path / "hf")
    assert found(tmp_path / "hf") == "int8"
    assert dtype_of_draft(str(tmp_path / "hf"), "native", platform="tpu") == "int8"
    quantise(tmp_path / "hf")
    assert found(tmp_path / "hf") == "native"
    assert dtype_of_draft(str(tmp_path / "hf"), "native", platform="tpu") == "native"
    assert dtype_of_draft(str(tmp_path / "hf"), "bfloat16", platform="cpu") == "bfloat16"


def test_an_int8_draft_has_one_digit_on_a_processor():
    [draft, *_] = (str(shipped_draft.path) for shipped_draft in shipped_drafts())
    for dtype in ("bfloat16", "int8", "native"):
        assert dtype_of_draft(draft, dtype, platform="cpu") == "w8a8"
    for dtype, platform in (("bfloat16", "tpu"), ("bfloat16", None), ("float32", "cpu")):
        assert dtype_of_draft(draft, dtype, platform=platform) == dtype
    assert dtype_of_draft(draft, "native", platform="tpu") == "int8"


@pytest.mark.parametrize(
    ("given", "opened", "settled"),
    [(None, "int8", "int8"), ("int8", "int8", "int8"), ("native", "native", "native")],
)
def test_the_dtype_of_a_draft_is_resolved_when_it_is_opened(
    tiny_checkpoint, monkeypatch, given, opened, settled
):
    """Its process and measured costs have it from the resolved configuration."""
    dtypes, open_model = [], resolve.open_model

    def opening(source, dtype, **others):
        dtypes.append(dtype)
        return open_model(source, "float32", **others)

    monkeypatch.setattr(resolve, "open_model", opening)
    draft = {"mode": "sd", "draft": str(tiny_checkpoint), "draft_dtype": given}
    found = LLM(str(tiny_checkpoint), dtype="native", load=False, compile_cache="off", **draft)
    assert dtypes == ["native", opened]
    assert found.resolved.draft_dtype == settled
    assert found.config.draft_dtype == given
