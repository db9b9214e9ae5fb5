"""Which tensors a decoder has a place for, by Hugging Face's names.

Leaving out a tensor of a layer, norm or head would make another model. Tensors that no model
computes with are allowed: RoPE tables and masks, which older checkpoints hold, a tied head, and
biases of zeros, which AutoGPTQ wrote for every matrix.
"""

from __future__ import annotations

import re

import numpy as np

from ssd_jax.checkpoints.weights.tensors import TensorSource
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.mechanisms import Experts
from ssd_jax.system.files import shown

_ROWS_AT_A_TIME = 4096  # that are compared at once
_MODULE = re.compile(r"(?:model\.layers\.\d+|model\.embed_tokens|model\.norm|lm_head)\.(.+)")
_EVERY_MODEL = (
    r"weight",
    r"self_attn\.[qkvo]_proj\.weight",
    r"self_attn\.(rotary_emb\.\w+|(masked_)?bias)",
)


def check_places(tensors: TensorSource, config: ModelConfig, where: str) -> None:
    """Refuses a checkpoint with tensors that its decoder would leave out.

    Raises:
      InputError: there is such a tensor.
    """
    for name in tensors.shapes:
        if not has_place(name, config) and not _is_zero_bias(tensors, name):
            raise no_place(name, where)


def _is_zero_bias(tensors: TensorSource, name: str) -> bool:
    return name.endswith(".bias") and len(tensors.shape(name)) == 1 and not tensors.read(name).any()


def check_tied(tensors: TensorSource, config: ModelConfig, where: str) -> None:
    """Refuses a checkpoint whose head would be left out because its settings share the embedding.

    Both are read if both are stored.

    Raises:
      InputError: they differ.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if not config.tie_embeddings or not {embedding, head} <= tensors.shapes.keys():
        return
    count = tensors.shape(embedding)[0]
    parts = [
        (slice(start, min(start + _ROWS_AT_A_TIME, count)),)
        for start in range(0, count, _ROWS_AT_A_TIME)
    ]
    if tensors.shape(embedding) != tensors.shape(head) or not all(
        np.array_equal(tensors.read(embedding, part), tensors.read(head, part)) for part in parts
    ):
        raise InputError(
            f"{where}: {head} differs from {embedding}, and tie_word_embeddings is true; set it to "
            "false in config.json to use the head, or remove the tensor"
        )


def has_place(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is used, or does not affect results."""
    if name == "model.norm.bias":
        return config.mechanisms.layer_norm and config.mechanisms.norm_bias
    match = _MODULE.fullmatch(name)
    return match is None or re.fullmatch("|".join(_patterns(config)), match[1]) is not None


def _patterns(config: ModelConfig) -> list[str]:
    m = config.mechanisms
    norm = r"(weight|bias)" if m.layer_norm and m.norm_bias else "weight"
    before, after = m.norm_placement != "post", m.norm_placement != "pre"
    dense = m.experts is None or bool(m.experts.dense_layers)
    patterns = {
        rf"input_layernorm\.{norm}": before,
        rf"post_attention_layernorm\.{norm}": before and not m.parallel,
        rf"(attention|mlp)_output_norm\.{norm}": after,
        r"mlp\.(up|down)_proj\.weight": dense,
        r"mlp\.gate_proj\.weight": dense and m.gated,
        r"mlp\.(gate|up|down)_proj\.bias": dense and m.mlp_bias,
        r"self_attn\.[qkv]_proj\.bias": config.qkv_bias,
        r"self_attn\.o_proj\.bias": m.output_bias,
        r"self_attn\.[qk]_norm\.weight": config.qk_norm,
        r"self_attn\.sinks": m.sinks,
        r"mlp\.act_fn\.alpha_[pn]": m.activation == "xielu",
    }
    if m.experts is not None:
        patterns |= _of_experts(m.experts, bias=m.mlp_bias)
    return [*_EVERY_MODEL, *(pattern for pattern, has_tensor in patterns.items() if has_tensor)]


def _of_experts(experts: Experts, *, bias: bool) -> dict[str, bool]:
    """Patterns of names in layers with experts; `bias` is of the one for all tokens."""
    return {
        r"mlp\.router\.weight": True,
        r"mlp\.router\.bias": experts.router_bias,
        r"mlp\.router\.e_score_correction_bias": experts.correction,
        r"mlp\.experts\.(gate|up|down)_proj\.weight": True,
        r"mlp\.experts\.(gate|up|down)_proj\.bias": experts.biases,
        r"mlp\.shared_expert\.(gate|up|down)_proj\.weight": experts.shared > 0,
        r"mlp\.shared_expert\.(gate|up|down)_proj\.bias": experts.shared > 0 and bias,
        r"mlp\.shared_expert_gate\.weight": experts.shared_gate,
    }


def no_place(name: str, where: str) -> InputError:
    """The error about a tensor without a place."""
    return InputError(
        f"{where}: the decoder has no place for tensor {shown(name)}; the model has a feature that "
        "is not supported"
    )
