"""A tiny target and the text that it writes, with its probabilities: what training reads."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sequence import sequence_hidden, sequence_logits
from ssd_jax.testing import tiny
from ssd_jax.tools.distill.shards import Sample
from tests.models.golden import FLOAT32, parameters


def logits_of(target: Checkpoint, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of whole texts [B, T], by the target."""
    model = FunctionalModel(target.config, FLOAT32)
    weights = parameters(target, model)
    return np.asarray(jax.jit(lambda w, t: _logits(model, w, t))(weights, tokens))


def write(
    target: Checkpoint, *, texts: int, prompt: int, length: int, top: int, letters: int = 64
) -> list[Sample]:
    """Random prompts of few different tokens, continued at temperature 1."""
    model = FunctionalModel(target.config, FLOAT32)
    weights = parameters(target, model)
    start = np.random.default_rng(0).integers(0, letters, (texts, length)).astype(np.int32)

    @jax.jit
    def write(weights, tokens):
        def put(place, tokens):
            row = _logits(model, weights, tokens)[:, place - 1, : tiny.TOKENS - 3]
            drawn = jax.random.categorical(jax.random.fold_in(jax.random.key(0), place), row)
            return tokens.at[:, place].set(drawn)

        tokens = jax.lax.fori_loop(prompt, length, put, tokens)
        probs = jax.nn.softmax(_logits(model, weights, tokens))
        return tokens, *jax.lax.top_k(probs, top)

    tokens, probs, ids = (np.asarray(x) for x in write(weights, start))
    return [
        Sample(
            tokens=tokens[i],
            prompt_length=prompt,
            top_ids=ids[i].astype(np.int32),
            top_probs=probs[i].astype(np.float32),
        )
        for i in range(texts)
    ]


def _logits(model, weights, tokens):
    module = model.module(weights)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = sequence_hidden(module, tokens, positions, jnp.ones_like(tokens))
    return sequence_logits(module, hidden.reshape(tokens.size, -1)).reshape(*tokens.shape, -1)


def write_sharp_target(path: Path, family: str = "llama", sharpness: float = 4.0) -> Path:
    """A tiny checkpoint that is surer of its next token than random weights are, and less swayed
    by the tokens before the last, so that little text tells much about it."""
    from safetensors.numpy import load_file, save_file

    tiny.write_checkpoint(path, family)
    file = path / "model.safetensors"
    tensors = load_file(file)
    norm = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = (norm * sharpness).astype(norm.dtype)
    for name in tensors:
        if name.endswith("o_proj.weight"):
            tensors[name] = (tensors[name] * 0.1).astype(norm.dtype)
    save_file(tensors, file)
    return path


def parameters_of(target: Checkpoint) -> dict[str, np.ndarray]:
    """The target's tensors by name, float32."""
    tensors = target.tensors
    return {name: tensors.read(name).astype(np.float32) for name in tensors.shapes}
