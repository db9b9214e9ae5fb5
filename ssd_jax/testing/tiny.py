"""Tiny checkpoints with random weights, in the Hugging Face layout, tokenizer included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel

EOS, END_OF_TURN, PAD = 256, 257, 258
TOKENS, ROWS = 259, 320
"""Number of ids, and of rows of the embedding: rows beyond the ids are vocabulary padding."""
TEMPLATE = (
    "{% for m in messages %}<eot>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<eot>assistant:{% endif %}"
)


def config(family: str, **changes: Any) -> dict[str, Any]:
    """`config.json` of a decoder with two layers."""
    base = {
        "model_type": family,
        "vocab_size": ROWS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": family == "llama",
        "eos_token_id": EOS,
    }
    return base | changes


def weights(hf_config: dict[str, Any], seed: int = 0, noise: float = 0.0) -> dict[str, np.ndarray]:
    """Random bfloat16 tensors, large enough that greedy text is not constant.

    With noise they make a draft that agrees with the model of the same seed, but not always.
    """
    rng, other = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    float32 = Execution(compute=np.dtype(np.float32), pages=np.dtype(np.float32))
    tensors = {}
    for name, struct in (
        FunctionalModel(ModelConfig.from_hf(hf_config), float32).checkpoint_structs().items()
    ):
        values = rng.normal(0, 0.3, struct.shape).astype(np.float32)
        values += other.normal(0, noise, struct.shape).astype(np.float32)
        if name.endswith("norm.weight"):
            values += 1
        tensors[name] = values.astype(ml_dtypes.bfloat16)
    return tensors


def write_tokenizer(directory: Path, *, template: str | None = TEMPLATE) -> None:
    """Writes a byte-level tokenizer: one token a byte, then <eos>, <eot>, <pad>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<eot>", "<pad>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"})
    )
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [EOS, END_OF_TURN]})
    )
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)


def write_checkpoint(
    directory: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    noise: float = 0.0,
    **changes: Any,
) -> Path:
    """Writes a complete checkpoint directory, creating it if needed.

    Args:
      family: its `model_type`.
      seed, noise: see `weights`.
      changes: changes to its configuration.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    hf_config = config(family, **changes)
    (directory / "config.json").write_text(json.dumps(hf_config))
    save_file(weights(hf_config, seed, noise), directory / "model.safetensors")
    write_tokenizer(directory)
    return directory
