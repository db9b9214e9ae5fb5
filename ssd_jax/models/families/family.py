"""What a file of this folder says of a line of models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.mechanisms import Experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertArrays:
    """Arrays of a file that have a matrix, or a bias, of every expert.

    Those without the suffix `.weight` are matrices [experts, in, out].

    Attributes:
      modules: by the file's name of a module, this package's; of several, each has as many rows.
      interleaved: whether rows of several take turns; else those of one follow those of another.
    """

    modules: Mapping[str, tuple[str, ...]]
    interleaved: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """How a family's safetensors files differ from this package's names and rows.

    Attributes:
      modules: by the file's name of a module in a layer, this package's; of several, each has some
        of the module's rows, in this order.
      rotates_neighbours: whether the rotated dimensions of a head are paired as neighbours, and not
        by halves.
      norm_offset: what is added to the weights of all norms.
      prefixes: by the beginning of names in the file, what takes its place.
      experts: by the file's name of a module of one expert, or of one head, with * for its number,
        this package's of all.
      expert_arrays: see there; None where there are none.
      left_out: a module of layers that predict tokens further on, which are left out; "" is none.
      axes: by the end of this package's names, the axes of tensors of one row, which files may have
        as vectors or as matrices.
      constants: by the end of the file's names, numbers that the decoder has as constants.
    """

    modules: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    rotates_neighbours: bool = False
    norm_offset: float = 0.0
    prefixes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    expert_arrays: ExpertArrays | None = None
    left_out: str = ""
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)


NEIGHBOURS = TensorLayout(rotates_neighbours=True)
QKV_JOINED = {"self_attn.qkv_proj": tuple(f"self_attn.{part}_proj" for part in "qkv")}
TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""Of the decoders in models that see images."""
GATE_UP_JOINED = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
NORMS_BEHIND = {
    "post_attention_layernorm": ("attention_output_norm",),
    "post_feedforward_layernorm": ("mlp_output_norm",),
}
"""Files whose norms are those of what attention and feed-forward add."""
GGUF_BOTH_NORMS = {
    "post_attention_norm": "attention_output_norm",
    "post_ffw_norm": "mlp_output_norm",
}
GGUF_NORM_BEFORE = {"post_attention_norm": "post_attention_layernorm"}
"""Of GGUF files: norms of what attention and feed-forward give, and the one before the feed-forward
under the first name of these."""
EXPERTS_APART = {
    f"mlp.experts.*.{part}_proj": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")
}
"""Files that have the experts one by one."""
MIXTRAL_EXPERTS = {
    f"block_sparse_moe.experts.*.{name}": f"mlp.experts.{part}_proj"
    for name, part in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
}
"""The same with Mixtral's names."""
SHARED_EXPERTS = {
    f"mlp.shared_experts.{part}_proj": (f"mlp.shared_expert.{part}_proj",)
    for part in ("gate", "up", "down")
}
"""Files whose shared experts are one module."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufArchitecture:
    """How llama.cpp's converter writes what config.json says.

    Attributes:
      name: llama.cpp's.
      read: from the header, keys of a config.json that only this architecture has; they may take
        the place of others, `model_type` too.
      modules: llama.cpp's names of modules in a layer that are Hugging Face's, or this package's,
        only here.
      layout: matrices that hold several, and whether the rotated dimensions of q and k heads are
        stored as neighbours, as llama.cpp's RoPE rotates them there. Norms have no offset.
      divisors: the tensors with numbers by which frequencies of RoPE are divided.
      partial_rotary: whether `rope.dimension_count` may be less than a head has.
      layer_norm: whether norms subtract the mean.
      activations: whether the header has parameters of every layer's activation.
    """

    name: str
    read: Callable[[GgufKeys], Mapping[str, Any]] = lambda _: {}
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layout: TensorLayout = TensorLayout()
    divisors: tuple[str, ...] = ()
    partial_rotary: bool = False
    layer_norm: bool = False
    activations: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A line of models with one `model_type`.

    Attributes:
      name: its `model_type`.
      read: from its config.json, the fields of `ModelConfig` and `Mechanisms` that it switches,
        apart from those that every config.json has.
      defaults: keys that its config.json may leave out, and their values.
      renamed: keys that it spells otherwise, and the usual ones.
      local_rope: whether layers with a window have RoPE of their own, unscaled.
      part: key of its config.json under which that of the decoder is, where there is such a key;
        empty if it is all of it.
      layout: of its safetensors files.
      gguf: the architecture of its GGUF files; None if they have another family's, or there are
        none.
    """

    name: str
    read: Callable[[ConfigReader], Mapping[str, Any]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    local_rope: bool = False
    part: str = ""
    layout: TensorLayout = TensorLayout()
    gguf: GgufArchitecture | None = None

    def reader(self, config: Mapping[str, Any], source: str) -> ConfigReader:
        """The config.json of the decoder with the usual keys."""
        if self.part in config:
            tied = "tie_word_embeddings"
            outer = {} if config.get(tied) is None else {tied: config[tied]}
            config = {**outer, **config[self.part]}
        if self.local_rope:
            config = _with_local_rope(config, source)
        renamed = {usual: config[key] for key, usual in self.renamed.items() if key in config}
        return ConfigReader({**self.defaults, **config, **renamed}, source)


LOCAL_THETA = "rope_local_base_freq"
"""Key of the base of RoPE in layers with a window."""


def _with_local_rope(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """A config.json with RoPE settings for each kind of layer in the older spelling.

    Raises:
      InputError: RoPE of layers with a window is scaled.
    """
    ropes = config.get("rope_parameters") or {}
    if "full_attention" not in ropes:
        return config
    local = ConfigReader(ropes.get("sliding_attention") or {}, source)
    if local.get("rope_type", "default") != "default":
        raise local.unsupported("rope_type", local.get("rope_type"), "layers have a window")
    theta = {LOCAL_THETA: local.get("rope_theta")} if local.get("rope_theta") else {}
    return {**config, "rope_parameters": ropes["full_attention"], **theta}


def biases(config: ConfigReader) -> dict[str, Any]:
    """Biases as llama spells them: of all four matrices of attention, and of the feed-forward."""
    attention = config.flag("attention_bias")
    return {
        "qkv_bias": attention,
        "output_bias": attention,
        "mlp_bias": config.flag("mlp_bias"),
    }


def partial_rotary(config: ConfigReader, default: float = 1.0) -> dict[str, Any]:
    """The dimensions of a head that are rotated, if not all, from the newer key or the older.

    Raises:
      InputError: more than all, or an odd number.
    """
    key = "partial_rotary_factor"
    newer = config.get("rope_parameters") or {}
    factor = ConfigReader({**config.values, **newer}, config.source).positive(key, default)
    config.get(key)
    heads = config.count("num_attention_heads")
    head_dim = config.count("head_dim", config.count("hidden_size") // heads)
    dims = int(head_dim * factor)
    if factor > 1 or dims % 2 or not dims:
        raise config.unsupported(key, factor, f"it rotates {dims} of {head_dim} dimensions")
    return {} if dims == head_dim else {"rotary_dim": dims}


def sigmoid_experts(config: ConfigReader) -> dict[str, Any]:
    """Experts as DeepSeek-V3 spells them: by sigmoids with a correction, some for all tokens.

    Raises:
      InputError: they are chosen in groups.
    """
    for key in ("n_group", "topk_group"):
        if config.get(key) not in (1, None):
            raise config.unsupported(key, config.get(key), "experts are not chosen by groups")
    size, layers = config.count("moe_intermediate_size"), config.count("num_hidden_layers")
    shared, first = (
        config.count(key) if config.get(key) else 0
        for key in ("n_shared_experts", "first_k_dense_replace")
    )
    kinds = config.get("mlp_layer_types") or ["dense"] * first
    experts = Experts(
        count=config.count("n_routed_experts"),
        chosen=config.count("num_experts_per_tok"),
        intermediate=size,
        scoring="sigmoid",
        normalized=config.flag("norm_topk_prob"),
        scale=float(config.positive("routed_scaling_factor", 1.0)),
        correction=True,
        shared=shared * size,
        dense_layers=tuple(i for i, kind in enumerate(kinds[:layers]) if kind == "dense"),
    )
    return {"experts": experts.of_layers(range(layers))}
