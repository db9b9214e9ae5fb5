"""gpt-oss as it is published, in MXFP4, and as others publish it, in floats."""

import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.weights.native import native_kinds
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.stacks import Stacks
from ssd_jax.testing import tiny
from tests.checkpoints.gguf.converter import convert
from tests.checkpoints.tiny_gpt_oss import CONFIG, METHOD, published, write
from tests.models.golden import Runner, our_logits, parameters

TOKENS = np.random.default_rng(0).integers(0, tiny.TOKENS, (2, 12)).astype(np.int32)


def test_a_model_in_mxfp4_is_the_one_in_floats(tmp_path):
    quantised, floats = published()
    one = write(tmp_path / "mxfp4", quantised, quantization_config=METHOD)
    other = write(tmp_path / "floats", floats)
    names = [{*open_checkpoint(str(path)).tensors.shapes} for path in (one, other)]
    assert names[0] == names[1]
    assert "model.layers.1.mlp.experts.up_proj.weight" in names[0]
    np.testing.assert_array_equal(our_logits(one, TOKENS), our_logits(other, TOKENS))


@pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")
def test_experts_in_mxfp4_are_multiplied_as_they_are(tmp_path):
    path = write(tmp_path / "mxfp4", published()[0], quantization_config=METHOD)
    checkpoint = open_checkpoint(str(path))
    kinds = native_kinds(checkpoint.tensors, where="here")
    assert {kind for name, kind in kinds.items() if ".experts." in name} == {"MXFP4"}
    assert not any("router" in name or name.endswith("bias") for name in kinds)
    execution = Execution.for_platform("cpu", "native", linear="cpu")
    model = FunctionalModel(checkpoint.config.for_context(TOKENS.shape[1]), execution, stored=kinds)
    got = Runner(model, parameters(checkpoint, model), slots=2)(TOKENS)
    want = our_logits(path, TOKENS)
    assert np.abs(got - want).mean() < 0.03 * want.std()


@pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")
def test_experts_in_mxfp4_are_packed_where_they_stay(tmp_path, monkeypatch):
    spans, prepare = [], Stacks.prepare

    def watched(stacks, name, array):
        spans.append((name, np.asarray(array).ctypes.data, array.nbytes))
        return prepare(stacks, name, array)

    path = write(tmp_path / "mxfp4", published()[0], quantization_config=METHOD)
    checkpoint = open_checkpoint(str(path))
    kinds = native_kinds(checkpoint.tensors, where="here")
    execution = Execution.for_platform("cpu", "native", linear="cpu")
    config = checkpoint.config.for_context(TOKENS.shape[1])
    model = FunctionalModel(config, execution, stored=kinds)
    monkeypatch.setattr(Stacks, "prepare", watched)
    found = [(a.unsafe_buffer_pointer(), a.nbytes) for a in parameters(checkpoint, model)]
    stored = {name: span for name, *span in spans if kinds.get(name) == "MXFP4"}
    assert len(stored) == 3 * CONFIG["num_hidden_layers"]
    for name, (start, nbytes) in stored.items():
        assert any(at <= start and start + nbytes <= at + size for at, size in found), name


def test_a_gguf_file_keeps_blocks_and_logits(tmp_path):
    origin = write(tmp_path / "mxfp4", published()[0], quantization_config=METHOD)
    path = convert(origin, tmp_path / "m.gguf", "gpt-oss")
    one, other = (open_checkpoint(str(source)).tensors for source in (origin, path))
    assert one.shapes == other.shapes
    experts = [name for name in one.shapes if ".experts." in name and name.endswith("weight")]
    assert len(experts) == 3 * CONFIG["num_hidden_layers"]
    for name in experts:
        assert other.stored_type(name) == "MXFP4"
        np.testing.assert_array_equal(other.read_blocks(name), one.read_blocks(name))
        for expert, blocks in enumerate(one.read_blocks(name)):
            for tensors in (one, other):
                part = tensors.read_expert_blocks(name, expert, slice(3, len(blocks)))
                np.testing.assert_array_equal(part, blocks[3:])
    np.testing.assert_array_equal(our_logits(path, TOKENS), our_logits(origin, TOKENS))


@pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")
def test_a_gguf_file_is_multiplied_as_it_is(tmp_path):
    origin = write(tmp_path / "mxfp4", published()[0], quantization_config=METHOD)
    path = convert(origin, tmp_path / "m.gguf", "gpt-oss", matrices="BF16")
    checkpoint = open_checkpoint(str(path))
    kinds = native_kinds(checkpoint.tensors, where="here")
    assert {*kinds.values()} == {"MXFP4", "bfloat16"}
    execution = Execution.for_platform("cpu", "native", linear="cpu")

    def logits(source):
        found = open_checkpoint(str(source))
        stored = native_kinds(found.tensors, where="here")
        config = found.config.for_context(TOKENS.shape[1])
        model = FunctionalModel(config, execution, stored=stored)
        return Runner(model, parameters(found, model), slots=2)(TOKENS)

    np.testing.assert_array_equal(logits(path), logits(origin))
