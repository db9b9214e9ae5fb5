"""What is known of a model before its weights load."""

from __future__ import annotations

import re

from ssd_jax.checkpoints.weights.safetensors import SafetensorsDirectory
from ssd_jax.devices.opening import models as opened
from ssd_jax.devices.opening.models import open_model
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_gguf, tiny_models


def test_other_weights_at_the_same_path_are_known_by_a_few_rows(tmp_path):
    found, path = [], str(tmp_path / "model")
    for seed in (0, 1, 0):
        tiny.write_checkpoint(path, seed=seed)
        found.append(open_model(path, "float32").weights)
    assert found[0] == found[2] != found[1]


def test_the_same_weights_stored_in_other_types_are_others(tmp_path):
    tensors, path = tiny_models.hf_tensors("llama"), tmp_path / "model.gguf"
    tokens = ["a", "b", "ab", *tiny_gguf.TOKENIZER["tokenizer.ggml.tokens"][3:]]
    tokenizer = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"]}
    keys = tiny_gguf.metadata("llama") | tokenizer
    found = set()
    for kind in ("F32", "Q8_0", "Q4_0"):
        types = {name: kind for name, tensor in tensors.items() if tensor.ndim == 2}
        tiny_gguf.write(path, "llama", tensors, types=types, keys=keys)
        found.add(open_model(str(path), "float32").weights)
    assert len(found) == 3


def test_of_many_tensors_some_of_each_kind_are_looked_at(tmp_path, monkeypatch):
    """Who trains a model further may change the same matrix of every layer."""
    tiny.write_checkpoint(tmp_path, num_hidden_layers=6)
    model, read = open_model(str(tmp_path), "float32"), []
    part = SafetensorsDirectory.read_part
    monkeypatch.setattr(
        SafetensorsDirectory,
        "read_part",
        lambda self, name, index: (read.append(name), part(self, name, index))[1],
    )
    monkeypatch.setattr(opened, "_TENSORS", 20)
    assert model.weights
    assert len(read) <= 20
    kinds, seen = (
        {re.sub(r"\d+", "N", n) for n in names}
        for names in (model.model.checkpoint_structs(), read)
    )
    assert {kind for kind in kinds if "N" in kind} <= seen
