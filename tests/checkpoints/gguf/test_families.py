"""GGUF files of every architecture, against the checkpoints they were converted from."""

from __future__ import annotations

import dataclasses
import json
import shutil

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ssd_jax.checkpoints.gguf.header import read_header
from ssd_jax.checkpoints.gguf.source import GGUFFile
from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.errors import InputError
from ssd_jax.models.families.family import QKV_JOINED, TensorLayout
from ssd_jax.models.families.registry import ARCHITECTURES
from tests.checkpoints import tiny_gguf
from tests.checkpoints.gguf.converter import convert
from tests.models.golden import our_logits
from tests.models.golden_logits import GOLDENS, golden
from tests.selection import cases

CONVERTED = [
    ("apertus", "apertus"),
    ("arcee", "arcee"),
    ("cohere", "command-r"),
    ("cohere-norms", "command-r"),
    ("cohere2", "cohere2"),
    ("dots1", "dots1"),
    ("ernie", "ernie4_5"),
    ("exaone4", "exaone4"),
    ("exaone-moe", "exaone-moe"),
    ("ernie-moe", "ernie4_5-moe"),
    ("gemma", "gemma"),
    ("gemma2", "gemma2"),
    ("gemma3", "gemma3"),
    ("glm", "chatglm"),
    ("glm4", "glm4"),
    ("glm4-moe", "glm4moe"),
    ("gpt-oss", "gpt-oss"),
    ("granite", "granite"),
    ("granite-hybrid", "granite"),
    ("granitemoe", "granitemoe"),
    ("hunyuan", "hunyuan-dense"),
    ("hunyuan-moe", "hunyuan-moe"),
    ("hunyuan-3", "hy_v3"),
    ("internlm3", "llama"),
    ("jais2", "jais2"),
    ("llama-biases", "llama"),
    ("minimax-m2", "minimax-m2"),
    ("ministral3", "mistral3"),
    ("mistral", "llama"),
    ("mistral", "mistral3"),
    ("mixtral", "llama"),
    ("nemotron", "nemotron"),
    ("olmo2", "olmo2"),
    ("olmo3", "olmo2"),
    ("olmoe", "olmoe"),
    ("phi3", "phi3"),
    ("phi3-long", "phi3"),
    ("qwen2", "qwen2"),
    ("qwen2-moe", "qwen2moe"),
    ("qwen3-moe", "qwen3moe"),
    ("qwen2.5-vl", "qwen2vl"),
    ("qwen3-vl", "qwen3vl"),
    ("qwen3-vl-moe", "qwen3vlmoe"),
    ("qwen3-yarn", "qwen3"),
    ("seed-oss", "seed_oss"),
    ("smollm3", "smollm3"),
    ("solar-open", "glm4moe"),
    ("stablelm", "stablelm"),
    ("stablelm-norms", "stablelm"),
    ("starcoder2", "starcoder2"),
]
"""Golden checkpoints and architectures of llama.cpp."""

_OF_NAME = {name: architecture for name, (_, architecture) in ARCHITECTURES.items()}
_BOTH = _OF_NAME["olmo2"].modules
_EXCHANGED = dict(zip(_BOTH, [*_BOTH.values()][::-1], strict=True))
_UP_GATE = {"mlp.gate_up_proj": ("mlp.up_proj", "mlp.gate_proj")}
_FOLDED = {"gemma2": ".q_proj.weight", "gemma3": ".q_norm.weight"}
_GPT_OSS = _OF_NAME["gpt-oss"].read
_GATE_AS_UP = {
    "ffn_gate_exps": "mlp.experts.up_proj",
    "ffn_up_exps": "mlp.experts.gate_proj",
}
_SAME_FILES = {
    "mistral": "llama",
    "internlm3": "llama",
    "granitemoehybrid": "granite",
    "solar_open": "glm4_moe",
}
"""Families whose files have the architecture of another one."""
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 64,
}


def test_every_architecture_is_converted():
    assert {architecture for _, architecture in CONVERTED} == {*ARCHITECTURES}


@pytest.mark.parametrize(("name", "architecture"), CONVERTED)
def test_configuration_and_tensors_are_those_of_the_checkpoint(tmp_path, name, architecture):
    directory = checkpoint_of(name, tmp_path)
    origin = open_checkpoint(str(directory))
    file = GGUFFile(convert(directory, tmp_path / "m.gguf", architecture))
    assert alike(file.config) == alike(origin.config)
    shapes = origin.tensors.shapes
    assert file.shapes == {name: shapes[name] for name in shapes if ".visual." not in name}
    for tensor in file.shapes:
        if not tensor.endswith(_FOLDED.get(architecture, "nothing")):
            expected = origin.tensors.read(tensor).astype(np.float32)
            np.testing.assert_array_equal(file.read(tensor), expected, err_msg=tensor)


def checkpoint_of(name, tmp_path):
    """A stored checkpoint; of gpt-oss, with the only limit of gates that llama.cpp has."""
    if name != "gpt-oss":
        return GOLDENS / name
    directory = tmp_path / name
    shutil.copytree(GOLDENS / name, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"swiglu_limit": 7.0}))
    return directory


def alike(config):
    """A configuration without what a file cannot tell: which of several families that have the same
    decoder, a scale of scores that is folded into queries, and more digits than float32 has."""
    multipliers = dataclasses.replace(config.mechanisms.multipliers, scores=None)
    if config.family.startswith("granite"):
        multipliers = config.mechanisms.multipliers
    scaling = config.rope_scaling
    if scaling is not None:
        scaling = dataclasses.replace(scaling, attention_factor=round(scaling.attention_factor, 5))
    return dataclasses.replace(
        config,
        family=_SAME_FILES.get(config.family, config.family),
        rope_theta=float(np.float32(config.rope_theta)),
        rope_scaling=scaling,
        mechanisms=dataclasses.replace(config.mechanisms, multipliers=multipliers),
    )


@pytest.mark.parametrize(
    ("name", "architecture"), cases(CONVERTED, ("gemma3", "gemma3"), ("qwen3-moe", "qwen3moe"))
)
def test_logits_equal_the_oracle(tmp_path, name, architecture):
    tokens, expected = golden(name)
    directory = checkpoint_of(name, tmp_path)
    if directory != GOLDENS / name:
        expected = our_logits(directory, tokens)
    path = convert(directory, tmp_path / "m.gguf", architecture)
    np.testing.assert_allclose(our_logits(path, tokens), expected, atol=1e-4)


def normalised(architecture):
    read = _OF_NAME[architecture].read
    return lambda keys: {**read(keys), "norm_topk_prob": True}


def truncated(keys):
    read = _GPT_OSS(keys)
    return {**read, "rope_scaling": {**read["rope_scaling"], "truncate": True}}


@pytest.mark.parametrize(
    ("name", "architecture", "changes"),
    [
        ("smollm3", "smollm3", {"layout": TensorLayout()}),
        ("smollm3", "smollm3", {"read": lambda _: {"no_rope_layer_interval": 3}}),
        ("glm4", "glm4", {"layout": TensorLayout(modules=_OF_NAME["glm4"].layout.modules)}),
        ("glm4", "glm4", {"partial_rotary": False}),
        ("glm", "chatglm", {"layout": TensorLayout(modules=_OF_NAME["glm4"].layout.modules)}),
        ("ministral3", "mistral3", {"read": lambda _: {}}),
        ("stablelm-norms", "stablelm", {"read": lambda _: {}}),
        ("hunyuan-moe", "hunyuan-moe", {"modules": _GATE_AS_UP}),
        ("hunyuan-3", "hy_v3", {"read": _OF_NAME["dots1"].read}),
        ("granite", "granite", {"read": lambda _: {}}),
        ("olmo2", "olmo2", {"modules": _EXCHANGED}),
        ("gemma2", "gemma2", {"layout": TensorLayout(norm_offset=1.0)}),
        ("phi3", "phi3", {"layout": TensorLayout(modules=QKV_JOINED | _UP_GATE)}),
        ("seed-oss", "seed_oss", {"modules": _OF_NAME["gemma2"].modules}),
        ("mixtral", "llama", {"layout": TensorLayout()}),
        ("qwen3-moe", "qwen3moe", {"modules": _GATE_AS_UP}),
        ("qwen2-moe", "qwen2moe", {"layout": TensorLayout()}),
        ("qwen2-moe", "qwen2moe", {"read": normalised("qwen2moe")}),
        ("olmoe", "olmoe", {"read": normalised("olmoe")}),
        ("granitemoe", "granitemoe", {"layout": TensorLayout()}),
        ("glm4-moe", "glm4moe", {"modules": _OF_NAME["glm4"].modules}),
        ("glm4-moe", "glm4moe", {"partial_rotary": False}),
        ("minimax-m2", "minimax-m2", {"partial_rotary": False}),
        ("dots1", "dots1", {"read": _OF_NAME["qwen3moe"].read}),
        ("ernie-moe", "ernie4_5-moe", {"layout": TensorLayout(rotates_neighbours=True)}),
        ("cohere", "command-r", {"layout": TensorLayout()}),
        ("cohere-norms", "command-r", {"layout": TensorLayout()}),
        ("cohere2", "cohere2", {"read": _OF_NAME["command-r"].read}),
        ("gpt-oss", "gpt-oss", {"read": truncated}),
        ("gpt-oss", "gpt-oss", {"modules": {}}),
    ],
)
def test_a_fault_in_the_table_is_noticed(tmp_path, monkeypatch, name, architecture, changes):
    model_type, unchanged = ARCHITECTURES[architecture]
    changed = dataclasses.replace(unchanged, **changes)
    monkeypatch.setitem(ARCHITECTURES, architecture, (model_type, changed))
    with pytest.raises((AssertionError, InputError)):
        test_configuration_and_tensors_are_those_of_the_checkpoint(tmp_path, name, architecture)


def test_layers_that_predict_tokens_further_on_are_left_out(tmp_path):
    tokens, expected = golden("glm4-moe")
    directory = tmp_path / "with"
    shutil.copytree(GOLDENS / "glm4-moe", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = load_file(directory / "model.safetensors")
    layer = {name for name in tensors if name.startswith("model.layers.1.")}
    tensors |= {name.replace("layers.1.", "layers.2."): tensors[name] for name in layer}
    size = config["hidden_size"]
    tensors["model.layers.2.eh_proj.weight"] = np.ones((size, 2 * size), ml_dtypes.bfloat16)
    tensors["model.layers.2.enorm.weight"] = np.ones(size, ml_dtypes.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    path = convert(directory, tmp_path / "m.gguf", "glm4moe")
    assert {"blk.2.nextn.eh_proj.weight"} < {*read_header(path).tensors}
    np.testing.assert_allclose(our_logits(path, tokens), expected, atol=1e-4)


def test_windows_by_a_period_leave_out_the_last_layer_of_each(tmp_path):
    keys = tiny_gguf.metadata("gemma3", block_count=8, attention__sliding_window=16)
    config = config_of(tmp_path, "gemma3", keys)
    assert config.mechanisms.layer_kinds == (*["window"] * 5, "full", "window", "window")
    assert config.mechanisms.window_rope_theta == 10000.0
    keys |= {"gemma3.attention.sliding_window_pattern": 3}
    kinds = config_of(tmp_path, "gemma3", keys).mechanisms.layer_kinds
    assert [place for place, kind in enumerate(kinds) if kind == "full"] == [2, 5]


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_divides_queries_by_more_than_its_heads_size(
    tmp_path, architecture, layers
):
    keys = {"attention__key_length": 32, "attention__value_length": 32}
    of = {
        count: config_of(
            tmp_path, architecture, tiny_gguf.metadata(architecture, block_count=count, **keys)
        ).mechanisms.multipliers.scores
        for count in (26, layers)
    }
    assert of == {26: 32**-0.5, layers: 64**-0.5}


def test_soft_caps_that_a_file_leaves_out_are_llama_cpps(tmp_path):
    m = config_of(tmp_path, "gemma2", tiny_gguf.metadata("gemma2")).mechanisms
    assert (m.score_soft_cap, m.logit_soft_cap) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("granite", {"logit_scale": 8.0, "rope__scaling__finetuned": False}, "finetuned = False"),
        ("granite", {}, "granite.logit_scale is missing"),
        ("glm4", {"rope__dimension_sections": [8, 12, 12, 0]}, r"dimension_sections = \[8, 12"),
        ("glm4", {"nextn_predict_layers": 1}, "nextn_predict_layers = 1"),
        ("mistral3", {"attention__temperature_scale": 0.1}, "rope.scaling.type = None is not"),
        ("mistral3", YARN, "rope.scaling.type = 'yarn'"),
        (
            "mistral3",
            {"attention__temperature_scale": 0.1, **YARN},
            "mistral3.rope.scaling.yarn_log_multiplier is missing",
        ),
        ("hunyuan-moe", {**EXPERTS, "expert_shared_count": 2}, "expert_shared_count = 2"),
        (
            "hy_v3",
            {**EXPERTS, "expert_shared_feed_forward_length": 96},
            "expert_shared_feed_forward_length = 96 is no multiple of 64",
        ),
        ("stablelm", {}, "stablelm.attention.layer_norm_epsilon is missing"),
        ("qwen2", {"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("llama", {"logit_scale": 0.5}, "llama.logit_scale = 0.5"),
        ("llama", {"expert_count": 4}, "llama.expert_used_count is missing"),
        ("qwen3", {"expert_count": 4}, "qwen3.expert_count = 4 is not supported"),
        ("qwen3moe", {}, "qwen3moe.expert_count is missing"),
        ("qwen3moe", {**EXPERTS, "leading_dense_block_count": 1}, "leading_dense_block_count = 1"),
        ("granitemoe", {"logit_scale": 8.0}, "granitemoe.expert_count is missing"),
        (
            "granitemoe",
            {**EXPERTS, "logit_scale": 8.0, "expert_shared_feed_forward_length": 64},
            "expert_shared_feed_forward_length = 64",
        ),
        ("olmoe", {**EXPERTS, "attention__clamp_kqv": 8.0}, "clamp_kqv = 8.0"),
        ("dots1", {**EXPERTS, "expert_gating_func": 1}, "expert_gating_func = 1"),
        ("glm4moe", {**EXPERTS, "expert_group_count": 4}, "expert_group_count = 4"),
        ("minimax-m2", EXPERTS, "expert_gating_func = None"),
        (
            "ernie4_5-moe",
            {**EXPERTS, "expert_shared_feed_forward_length": 64},
            "expert_shared_feed_forward_length = 64",
        ),
        ("cohere2", {"attention__layer_norm_epsilon": 1e-5}, "cohere2.attention.sliding_window"),
        ("nemotron", {}, "nemotron.attention.layer_norm_epsilon is missing"),
    ],
)
def test_what_the_decoder_of_an_architecture_lacks_is_refused_by_key(
    tmp_path, architecture, changes, message
):
    with pytest.raises(InputError, match=message):
        config_of(tmp_path, architecture, tiny_gguf.metadata(architecture, **changes))


@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        ("qwen3next", "linear attention or state spaces"),
        ("deepseek2", r"experts and latent attention \(MLA\)"),
        ("gemma3n", "layers that share keys and values"),
    ],
)
def test_what_an_architecture_needs_that_there_is_not_is_named(tmp_path, architecture, part):
    with pytest.raises(InputError, match=f"'{architecture}' is not supported .it needs {part}"):
        config_of(tmp_path, architecture, tiny_gguf.metadata(architecture))


def test_files_of_glm_may_have_queries_keys_and_values_in_one_matrix(tmp_path):
    origin = GGUFFile(convert(GOLDENS / "glm", tmp_path / "apart.gguf", "chatglm"))
    joined = GGUFFile(joined_attention(tmp_path / "apart.gguf", tmp_path / "joined.gguf"))
    assert joined.config == origin.config
    assert joined.shapes == origin.shapes
    for name in origin.shapes:
        np.testing.assert_array_equal(joined.read(name), origin.read(name), err_msg=name)


def joined_attention(source, path):
    """A file whose layers have one matrix, and one bias, of queries, keys and values."""
    header, stored = read_header(source), gguf.GGUFReader(source)
    tensors = {tensor.name: tensor.data for tensor in stored.tensors}
    for layer in range(header.metadata["chatglm.block_count"]):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    keys = {k: v for k, v in header.metadata.items() if k.startswith("chatglm.")}
    raw = {name: (array, "F32") for name, array in tensors.items()}
    return tiny_gguf.write(path, "chatglm", {}, keys=keys, raw=raw)


def test_joined_and_single_matrices_are_not_both_read(tmp_path):
    raw = {
        "blk.0.ffn_up.weight": (np.zeros((1024, 256), np.float32), "F32"),
        "blk.0.ffn_gate.weight": (np.zeros((512, 256), np.float32), "F32"),
    }
    with pytest.raises(InputError, match=r"'model.layers.0.mlp.gate_proj.weight' is there twice"):
        config_of(tmp_path, "phi3", tiny_gguf.metadata("phi3"), raw)


def config_of(tmp_path, architecture, keys, raw=None):
    """The configuration of a file that has the embedding, and further tensors by ggml's names."""
    embedding = {"model.embed_tokens.weight": np.zeros((40, 256), np.float32)}
    path = tiny_gguf.write(tmp_path / "m.gguf", architecture, embedding, keys=keys, raw=raw)
    return GGUFFile(path).config
