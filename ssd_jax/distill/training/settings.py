"""What to train and how; every value is checked before any long work."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from ssd_jax.errors import InputError
from ssd_jax.models.config import FAMILIES, ModelConfig
from ssd_jax.sampling.params import check_types

Part = Literal["frozen", "trained"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """The draft's architecture; section [draft] of a configuration.

    Attributes:
      layers: indices of the target's layers that the draft begins with, in this order; empty: from
        scratch, with the sizes below.
      family: from scratch: "llama", "qwen2" or "qwen3"; "" is the target's.
      num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: from scratch; 0
        is the target's own (for `head_dim`: hidden_size / num_heads).
      embedding: "frozen" is the target's embedding, which is then not stored; "trained" starts with
        it where the sizes allow it.
      head: the same of the output head.
      output_size: ids that the draft can propose, the most frequent ones of the training texts and
        all that end a text; 0 is the whole vocabulary.
      store: "bfloat16" or "int8", how the trained matrices are stored.
    """

    layers: tuple[int, ...] = ()
    family: str = ""
    num_layers: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    embedding: Part = "frozen"
    head: Part = "frozen"
    output_size: int = 0
    store: Literal["bfloat16", "int8"] = "bfloat16"

    def __post_init__(self) -> None:
        check_types(self)
        if not isinstance(self.layers, list | tuple) or not all(
            type(n) is int for n in self.layers
        ):
            raise InputError(
                f"layers = {self.layers!r} must be a list of layer numbers, like [0, 29]"
            )
        object.__setattr__(self, "layers", tuple(self.layers))
        _one_of("embedding", self.embedding, ("frozen", "trained"))
        _one_of("head", self.head, ("frozen", "trained"))
        _one_of("store", self.store, ("bfloat16", "int8"))
        if self.family:
            _one_of("family", self.family, FAMILIES)
        for name in _SIZES:
            _at_least(name, getattr(self, name), 0)
        _at_least("output_size", self.output_size, 0)
        given = [name for name in ("family", *_SIZES) if getattr(self, name)]
        if self.layers and given:
            raise InputError(
                f"layers = {list(self.layers)} takes its sizes from the target; remove {given[0]}, "
                "or remove layers to begin from scratch"
            )
        if not self.layers and not self.num_layers:
            raise InputError(
                "a draft needs layers (indices of the target's) or num_layers (from scratch)"
            )

    def config(self, target: ModelConfig) -> ModelConfig:
        """The draft's architecture for a target.

        Raises:
          InputError: layers that the target does not have, sizes that do not fit each other, or a
            frozen part of another width than the target.
        """
        made = self._of_layers(target) if self.layers else self._from_scratch(target)
        for name in ("embedding", "head"):
            if getattr(self, name) == "frozen" and made.hidden_size != target.hidden_size:
                raise InputError(
                    f'{name} = "frozen" needs the target\'s hidden_size {target.hidden_size}, not '
                    f'{made.hidden_size}; set {name} = "trained" or hidden_size = 0'
                )
        if self.output_size > target.vocab_size:
            raise InputError(
                f"output_size = {self.output_size} is more than the target's vocabulary of "
                f"{target.vocab_size}; set 0 for all of it"
            )
        alike = (self.embedding, self.head, self.output_size) == ("frozen", "frozen", 0)
        return dataclasses.replace(
            made,
            tie_embeddings=alike and target.tie_embeddings,
            output_size=self.output_size or None,
        )

    def _of_layers(self, target: ModelConfig) -> ModelConfig:
        for layer in self.layers:
            if not 0 <= layer < target.num_layers:
                raise InputError(
                    f"layers: {layer!r} is out of range, the target has layers 0 to "
                    f"{target.num_layers - 1}"
                )
        return dataclasses.replace(target, num_layers=len(self.layers))

    def _from_scratch(self, target: ModelConfig) -> ModelConfig:
        sizes = {name: getattr(self, name) or getattr(target, name) for name in _SIZES}
        hidden, heads, kv_heads = (sizes[n] for n in ("hidden_size", "num_heads", "num_kv_heads"))
        if heads % kv_heads:
            raise InputError(f"num_heads = {heads} is no multiple of num_kv_heads = {kv_heads}")
        if not self.head_dim and (self.hidden_size or self.num_heads):
            if hidden % heads:
                raise InputError(
                    f"hidden_size = {hidden} is no multiple of num_heads = {heads}; set head_dim"
                )
            sizes["head_dim"] = hidden // heads
        if sizes["head_dim"] % 2:
            raise InputError(f"head_dim = {sizes['head_dim']} must be even, for RoPE")
        family = self.family or target.family
        assert family in FAMILIES
        return dataclasses.replace(
            target, family=family, qkv_bias=family == "qwen2", qk_norm=family == "qwen3", **sizes
        )


_SIZES = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How to train; section [train] of a configuration.

    Attributes:
      steps: of the optimiser, in all.
      batch: rows of a step, over all devices and micro-batches.
      accumulation: micro-batches of a step, one after another; divides `batch`.
      length: tokens of a row; texts are packed into rows, longer ones are cut.
      learning_rate: after `warmup` steps from 0; then a cosine down to `final_rate` times it.
      weight_decay: of matrices (AdamW).
      beta1, beta2: of AdamW.
      clip: largest norm of all gradients together.
      cross_entropy, kl, acceptance: weights of the losses, see `losses`.
      probabilities: "cached" are the target's top N that lie beside the texts; "live" runs the
        target on every batch.
      compute: dtype of products: "bfloat16" or "float32".
      chunk: tokens that go through the output head at once.
      rematerialise: run layers again for their gradients, which takes less memory.
      devices: number of devices that share a batch; 0 is all.
      seed: of the order of rows and of weights from scratch.
      keep: checkpoints that are kept.
      save_every, evaluate_every: steps between checkpoints, and between looks at held-out text.
      held_out: rows of held-out text that are looked at.
      max_seconds: of training in one run; it then stops with a checkpoint, from which the next run
        goes on. 0 is no limit.
    """

    steps: int
    batch: int = 8
    accumulation: int = 1
    length: int = 512
    learning_rate: float = 1e-3
    warmup: int = 100
    final_rate: float = 0.1
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    cross_entropy: float = 0.0
    kl: float = 1.0
    acceptance: float = 0.0
    probabilities: Literal["cached", "live"] = "cached"
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    chunk: int = 1024
    rematerialise: bool = False
    devices: int = 0
    seed: int = 0
    keep: int = 2
    save_every: int = 200
    evaluate_every: int = 200
    held_out: int = 16
    max_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{field.name} = {value} must be a finite number")
        for name in ("steps", "batch", "accumulation", "chunk", "keep", "save_every"):
            _at_least(name, getattr(self, name), 1)
        _at_least("evaluate_every", self.evaluate_every, 1)
        _at_least("length", self.length, 2)
        for name in ("warmup", "weight_decay", "devices", "seed", "held_out", "max_seconds"):
            _at_least(name, getattr(self, name), 0)
        _at_least("final_rate", self.final_rate, 0)
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} = {getattr(self, name)} must be above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)} must be at least 0 and below 1")
        weights = (self.cross_entropy, self.kl, self.acceptance)
        if min(weights) < 0 or not sum(weights) > 0:
            raise InputError(
                f"cross_entropy, kl, acceptance = {weights}: weights of losses must not be "
                "negative, and one must be above 0"
            )
        _one_of("probabilities", self.probabilities, ("cached", "live"))
        _one_of("compute", self.compute, ("bfloat16", "float32"))
        if self.batch % self.accumulation:
            raise InputError(
                f"batch = {self.batch} is no multiple of accumulation = {self.accumulation}"
            )


RESUMABLE = frozenset({"max_seconds", "keep", "save_every", "devices"})
"""Settings of a run, not of its result: they may change when training goes on."""


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise InputError(f"{name} = {value!r} must be at least {least}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name} = {value!r} must be one of {', '.join(allowed)}")
