"""A draft to be trained: what it begins with, which parts are the target's, how it is run."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import ArrayLike

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.drafts.checkpoint import HEAD, SCALE, Identity, write_draft
from ssd_jax.checkpoints.drafts.shipped import draft_source
from ssd_jax.checkpoints.drafts.source import DraftTensors
from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.quantized import quantize
from ssd_jax.models.config import ModelConfig, family_switches
from ssd_jax.models.execution import Execution
from ssd_jax.models.families.registry import SWITCHES
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.tools.distill.settings import SIZES, DraftSettings

Arrays = dict[str, jax.Array]
"""Arrays by checkpoint name."""

EMBEDDING = "model.embed_tokens.weight"
_STD = 0.02
"""Standard deviation of weights from scratch."""


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft without its arrays.

    Attributes:
      tied: names of frozen tensors -> names of the target's.
      output_ids: [N] int32, ascending, of a reduced output vocabulary.
    """

    config: ModelConfig
    model: FunctionalModel
    tied: Mapping[str, str]
    output_ids: np.ndarray | None

    @property
    def head(self) -> str:
        """Name of the tensor whose rows are the output head."""
        return EMBEDDING if self.config.tie_embeddings else HEAD


def draft_config(settings: DraftSettings, target: ModelConfig) -> ModelConfig:
    """The draft's architecture for a target.

    Raises:
      InputError: layers that the target does not have, sizes that do not fit each other, or a
        frozen part of another width than the target.
    """
    config = _of_layers(settings, target) if settings.layers else _of_sizes(settings, target)
    for name in ("embedding", "head"):
        if getattr(settings, name) == "frozen" and config.hidden_size != target.hidden_size:
            raise InputError(
                f'{name} = "frozen" needs the target\'s hidden_size {target.hidden_size}, not '
                f'{config.hidden_size}; set {name} = "trained" or hidden_size = 0'
            )
    size = settings.output_size
    if config.mechanisms.logit_soft_cap is not None:
        raise InputError(
            "the target caps its logits, and drafts with its decoder are not trained with a cap; "
            f"set family to one of {', '.join(SWITCHES)}"
        )
    same_matrices = (settings.embedding, settings.head, size) == ("frozen", "frozen", 0)
    tied = same_matrices and target.tie_embeddings
    return dataclasses.replace(config, tie_embeddings=tied, output_size=size or None)


def _of_layers(settings: DraftSettings, target: ModelConfig) -> ModelConfig:
    for layer in settings.layers:
        if not 0 <= layer < target.num_layers:
            raise InputError(
                f"layers: {layer!r} is out of range, the target has layers 0 to "
                f"{target.num_layers - 1}"
            )
        if target.mechanisms.has_experts(layer):
            raise InputError(
                f"layers: layer {layer} of the target has experts, and drafts are trained without; "
                "give sizes instead, num_layers and others"
            )
    return target.of_layers(settings.layers)


def _of_sizes(settings: DraftSettings, target: ModelConfig) -> ModelConfig:
    sizes = {name: getattr(settings, name) or getattr(target, name) for name in SIZES}
    hidden, heads, kv_heads = (sizes[n] for n in ("hidden_size", "num_heads", "num_kv_heads"))
    if heads % kv_heads:
        raise InputError(f"num_heads = {heads} is no multiple of num_kv_heads = {kv_heads}")
    if not settings.head_dim and (settings.hidden_size or settings.num_heads):
        if hidden % heads:
            raise InputError(
                f"hidden_size = {hidden} is no multiple of num_heads = {heads}; set head_dim"
            )
        sizes["head_dim"] = hidden // heads
    if sizes["head_dim"] % 2:
        raise InputError(f"head_dim = {sizes['head_dim']} must be even, for RoPE")
    scaling = target.rope_scaling
    has_rotary_size = target.mechanisms.rotary_dim or (scaling and scaling.kind == "longrope")
    if has_rotary_size and (settings.family or sizes["head_dim"] != target.head_dim):
        raise InputError(
            f"the target's RoPE is made for heads of {target.head_dim} dimensions of its family "
            f"{target.family}; leave head_dim and family out"
        )
    if settings.family:
        sizes |= {"family": settings.family} | family_switches(settings.family)
    layers = [layer % target.num_layers for layer in range(sizes["num_layers"])]
    config = target.of_layers(layers)
    sizes.setdefault("mechanisms", dataclasses.replace(config.mechanisms, experts=None))
    return dataclasses.replace(config, **sizes)


def make_draft(
    settings: DraftSettings, target: ModelConfig, output_ids: np.ndarray | None
) -> Draft:
    """The draft that the settings describe; see `draft_config` for its errors."""
    config = draft_config(settings, target)
    execution = Execution(compute=jnp.dtype(jnp.float32), pages=jnp.dtype(jnp.float32))
    target_head = EMBEDDING if target.tie_embeddings else HEAD
    tied = {}
    if settings.embedding == "frozen":
        tied[EMBEDDING] = EMBEDDING
    if settings.head == "frozen" and not config.tie_embeddings:
        tied[HEAD] = target_head
    return Draft(config, FunctionalModel(config, execution), tied, output_ids)


def open_beginning(settings: DraftSettings, target: Checkpoint) -> Checkpoint | None:
    """The draft that training begins with, if one is named.

    Raises:
      InputError: it is no draft, is for another target, has other sizes than the settings say, a
        part of its own that they freeze, or a head whose ids training text would change.
    """
    if not settings.begin:
        return None
    beginning = open_checkpoint(draft_source(settings.begin, lambda: target), target=target)
    prefix, expected = f"begin = {settings.begin!r}", draft_config(settings, target.config)
    if not isinstance(beginning.tensors, DraftTensors):
        raise InputError(f"{prefix} is no draft that `ssd-jax distill` made; give its directory")
    for name in ("family", *SIZES):
        actual, required = getattr(beginning.config, name), getattr(expected, name)
        if actual != required:
            raise InputError(
                f"{prefix} has {name} {actual}, the other keys of [draft] say {required}"
            )
    for part, name in (("embedding", EMBEDDING), ("head", HEAD)):
        if getattr(settings, part) == "frozen" and name in beginning.tensors.stored:
            raise InputError(f'{prefix} has trained its {part}; set {part} = "trained"')
    if settings.head == "trained" and (settings.output_size or beginning.config.output_size):
        raise InputError(
            f"{prefix}: a trained head of fewer ids than the target's has those of the text that "
            "it was trained on; begin with a draft of all ids, with output_size = 0"
        )
    return beginning


def first_arrays(
    draft: Draft,
    settings: DraftSettings,
    target: Checkpoint,
    *,
    seed: int,
    beginning: Checkpoint | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The arrays that training begins with.

    Args:
      target: its tensors are read; only those that are needed.
      seed: of weights from scratch.
      beginning: see `open_beginning`.

    Returns: trained arrays, float32, and frozen ones, bfloat16.

    Raises:
      InputError: the target's data cannot be read.
    """
    trained, frozen = {}, {}
    for name, struct in draft.model.checkpoint_structs().items():
        source = _source(name, draft, settings, target.config)
        # A head that is trained from here on may have been the target's.
        if beginning is not None and name not in draft.tied and name in beginning.tensors.shapes:
            array = beginning.tensors.read(name)
        elif source is None:
            array = _from_scratch(name, struct.shape, draft.config.num_layers, seed)
        else:
            array = target.tensors.read(source)
            if name == HEAD and draft.output_ids is not None:
                array = array[draft.output_ids]
        if name in draft.tied:
            frozen[name] = array.astype(ml_dtypes.bfloat16)
        else:
            trained[name] = array.astype(np.float32)
    return trained, frozen


def _source(name: str, draft: Draft, settings: DraftSettings, target: ModelConfig) -> str | None:
    """The target's tensor that a tensor begins as; None if it begins from scratch."""
    if name in draft.tied:
        return draft.tied[name]
    if name in (EMBEDDING, HEAD):
        same_width = draft.config.hidden_size == target.hidden_size
        tied_head = name == HEAD and target.tie_embeddings
        return (EMBEDDING if tied_head else name) if same_width else None
    if not settings.layers:
        return None
    prefix, _, layer_path = name.partition("model.layers.")
    if prefix or not layer_path:
        return name
    layer, _, layer_tensor = layer_path.partition(".")
    return f"model.layers.{settings.layers[int(layer)]}.{layer_tensor}"


def _from_scratch(name: str, shape: tuple[int, ...], layers: int, seed: int) -> np.ndarray:
    """Normal values, smaller in matrices that add to the residual stream the more layers do."""
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith(".bias"):
        return np.zeros(shape, np.float32)
    adds = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = _STD / np.sqrt(2 * layers) if adds else _STD
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return rng.normal(0, std, shape).astype(np.float32)


def export(
    directory: Path,
    draft: Draft,
    trained: Mapping[str, ArrayLike],
    *,
    store: str,
    target: Identity,
    tokenizer: Tokenizer,
    acceptance: float | None = None,
) -> None:
    """Writes the draft; one that is there already is replaced once the new one is whole.

    Args:
      trained: float32 arrays by name.
      store: "bfloat16" or "int8", of matrices; vectors stay float32, and an embedding, whose rows
        are only looked up, is at least bfloat16.
      target, acceptance: see `write_draft`.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, values in trained.items():
        array = np.asarray(values, np.float32)
        if array.ndim == 1:
            tensors[name] = array
        elif store == "int8" and name != EMBEDDING:
            rows = quantize(jnp.asarray(array))
            tensors[name] = np.asarray(rows.values)
            tensors[name + SCALE] = np.asarray(rows.scales)
        else:
            tensors[name] = array.astype(ml_dtypes.bfloat16)
    write_draft(
        directory,
        config=draft.config,
        tensors=tensors,
        tied=draft.tied,
        output_ids=draft.output_ids,
        target=target,
        tokenizer=tokenizer,
        acceptance=acceptance,
    )
