"""Settings of a distillation: a TOML file of sections, each a frozen dataclass.

Types and limits are annotations, which msgspec checks as a section is read; rules over several
keys are checked in `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from ssd_jax.config.settings import AUTO_BUDGETS, AUTO_K, MAX_BUDGET, MAX_K
from ssd_jax.errors import InputError
from ssd_jax.models.families.registry import SWITCHES
from ssd_jax.options.toml_settings import read_section, read_toml
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.fan_out import LEAST_BUDGET
from ssd_jax.tools.distill.prompt_settings import PromptSettings
from ssd_jax.tools.distill.value_types import (
    Amount,
    Count,
    Fraction,
    NotNegative,
    Positive,
    Several,
)

SIZES = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
"""Sizes of a draft from scratch."""

Compute = Literal["bfloat16", "float32"]
Weighting = Literal["frozen", "trained"]
Temperatures = Annotated[
    tuple[float, ...], Meta(min_length=1, description="must be a list of at least one number")
]
HeldOutSets = Annotated[tuple[str, ...], Meta(description="must be a list of held-out sets")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """Section [target]: the model to draft for.

    Attributes:
      source: see `Config.target`.
      name: of the default directory of results; None is the configuration's. Configurations that
        share it, their prompts and [generate] share the text.
    """

    source: str = ""
    name: str | None = None
    dtype: Compute = "bfloat16"

    def __post_init__(self) -> None:
        if not self.source:
            raise InputError("source is missing; give a path, hf:org/name, or pip:package==version")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Section [generate]: the target's own completions.

    Attributes:
      completions: number in all; None is one of each prompt. If there are more than prompts, these
        are completed again, with other temperatures and noise.
      temperatures: taken in turn by each prompt, but 0 only once: it repeats the text.
      seed: of the noise and of the order of prompts.
      slots: completions decoded together.
      shard_tokens: most tokens of a shard, prompts included; at least as many as all slots take.
      top_n: number of likeliest tokens kept of each distribution of the target; 0 keeps none.
      processes: number that generate and score shards side by side, each with its own weights and
        share of the cores; at most one a core, and one where the target runs on an accelerator.
    """

    completions: Count | None = None
    max_tokens: Count = 256
    temperatures: Temperatures = (0.0, 0.7, 1.0)
    seed: int = 0
    slots: Count = 16
    shard_tokens: Count = 65536
    top_n: NotNegative = 64
    processes: Count = 1

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, seed=self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MagpieSettings(GenerateSettings):
    """Section [magpie]: user turns that the target writes (arXiv 2406.08464), as training prompts.

    Keys are those of [generate]; a turn of more than `max_tokens` is left out.
    """

    completions: Count = 10000
    max_tokens: Count = 128
    temperatures: Temperatures = (0.7, 0.85, 1.0)
    top_n: NotNegative = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_n:
            raise InputError(f"top_n = {self.top_n}: prompts are not learnt; leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """Section [draft]: its architecture.

    Attributes:
      layers: indices of the target's layers that the draft begins with, in this order; empty: from
        scratch, with the sizes below.
      family: from scratch: one of `SWITCHES`; "" is the target's.
      num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: from scratch; 0
        is the target's own (for `head_dim`, where the others differ: hidden_size / num_heads).
      embedding: "frozen" is the target's embedding, which is then not stored; "trained" starts with
        it where the sizes allow it.
      head: the same for the output head.
      output_size: ids that the draft can propose, the most frequent ones of the training texts and
        all that end a text; 0 is the whole vocabulary.
      store: how the trained matrices are stored.
      begin: a draft of this architecture for the same target, whose weights the draft begins with
        instead: its directory, or the name of one that comes with the package.
    """

    layers: Annotated[
        tuple[int, ...], Meta(description="must be a list of layer numbers, like [0, 29]")
    ] = ()
    family: str = ""
    num_layers: NotNegative = 0
    hidden_size: NotNegative = 0
    intermediate_size: NotNegative = 0
    num_heads: NotNegative = 0
    num_kv_heads: NotNegative = 0
    head_dim: NotNegative = 0
    embedding: Weighting = "frozen"
    head: Weighting = "frozen"
    output_size: NotNegative = 0
    store: Literal["bfloat16", "int8"] = "bfloat16"
    begin: str = ""

    def __post_init__(self) -> None:
        if self.family and self.family not in SWITCHES:
            raise InputError(f"family = {self.family!r} must be one of {', '.join(SWITCHES)}")
        sizes = [name for name in ("family", *SIZES) if getattr(self, name)]
        if self.layers and sizes:
            raise InputError(
                f"layers = {list(self.layers)} takes its sizes from the target; remove {sizes[0]}, "
                "or remove layers to begin from scratch"
            )
        if not self.layers and not self.num_layers:
            raise InputError(
                "a draft needs layers (indices of the target's) or num_layers (from scratch)"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Section [train]: how to train.

    Attributes:
      steps: of the optimiser, in all.
      batch: rows of a step, over all devices and micro-batches.
      accumulation: micro-batches of a step, one after another; divides `batch`.
      length: tokens of a row; texts are packed into rows, longer ones are cut.
      learning_rate: after `warmup` steps from 0; then a cosine down to `final_rate` times it.
      weight_decay, beta1, beta2: of AdamW; only weights of matrices decay.
      clip: largest norm of all gradients together.
      cross_entropy, kl, acceptance: weights of the losses, see `losses`.
      probabilities: "cached" are the target's top N stored beside the texts; "live" runs the
        target on every batch.
      compute: dtype of products.
      chunk: tokens that go through the output head at once.
      rematerialise: run layers again for their gradients, which takes less memory.
      devices: number of devices that share a batch; 0 is all.
      seed: of the order of rows and of weights from scratch.
      keep: number of newest checkpoints that stay on disk.
      save_every, evaluate_every: steps between checkpoints, and between looks at held-out text.
      held_out: number of rows of held-out text that are looked at.
      max_seconds: of steps in one run, which takes one at least; it then stops with a checkpoint,
        from which the next run continues. 0 is no limit.
    """

    steps: Count
    batch: Count = 8
    accumulation: Count = 1
    length: Several = 512
    learning_rate: Positive = 1e-3
    warmup: NotNegative = 100
    final_rate: Amount = 0.1
    weight_decay: Amount = 0.01
    beta1: Fraction = 0.9
    beta2: Fraction = 0.98
    clip: Positive = 1.0
    cross_entropy: float = 0.0
    kl: float = 1.0
    acceptance: float = 0.0
    probabilities: Literal["cached", "live"] = "cached"
    compute: Compute = "bfloat16"
    chunk: Count = 1024
    rematerialise: bool = False
    devices: NotNegative = 0
    seed: NotNegative = 0
    keep: Count = 2
    save_every: Count = 200
    evaluate_every: Count = 200
    held_out: NotNegative = 16
    max_seconds: Amount = 0.0

    def __post_init__(self) -> None:
        weights = (self.cross_entropy, self.kl, self.acceptance)
        if min(weights) < 0 or not sum(weights) > 0:
            raise InputError(
                f"cross_entropy, kl, acceptance = {weights}: weights of losses must not be "
                "negative, and one must be above 0"
            )
        if self.batch % self.accumulation:
            raise InputError(
                f"batch = {self.batch} is no multiple of accumulation = {self.accumulation}"
            )

    @property
    def compares(self) -> bool:
        """Whether a loss needs the target's probabilities stored beside the texts."""
        return self.probabilities == "cached" and bool(self.kl or self.acceptance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Section [evaluate]: how a draft is judged.

    Attributes:
      sets: of the held-out prompts, as `prompts.held_out` names them; empty is all.
      apart: those of them that the mean leaves out.
      prompts: number from each set, spread evenly over it; all where it has fewer.
      seed: of the noise at temperature 1.
      ks: numbers of speculated tokens, ascending.
      budgets: numbers of branches, ascending.
      repeats: timed forwards of every width.
    """

    sets: HeldOutSets = ()
    apart: HeldOutSets = ()
    prompts: Count = 40
    max_tokens: Several = 256
    seed: NotNegative = 0
    ks: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=MAX_K)], ...],
        Meta(min_length=1, description=f"must list integers from 1 to {MAX_K}"),
    ] = tuple(range(1, AUTO_K + 1))
    budgets: Annotated[
        tuple[Annotated[int, Meta(ge=LEAST_BUDGET, le=MAX_BUDGET)], ...],
        Meta(min_length=1, description=f"must list integers from {LEAST_BUDGET} to {MAX_BUDGET}"),
    ] = AUTO_BUDGETS
    repeats: Count = 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "sets", tuple(dict.fromkeys(self.sets)))
        for name in ("ks", "budgets"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        if max(self.ks) > self.max_tokens - 2:
            raise InputError(
                f"max_tokens = {self.max_tokens} leaves no room for ks = {list(self.ks)}; raise "
                "the one or lower the others"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """The contents of a configuration file; sections that it lacks are None.

    `name` is the file's, without its ending; `directory` is where the prompt files are.
    """

    name: str
    directory: Path
    target: TargetSettings
    prompts: PromptSettings
    generate: GenerateSettings
    draft: DraftSettings | None = None
    train: TrainSettings | None = None
    evaluate: EvaluateSettings | None = None
    magpie: MagpieSettings | None = None


_SECTIONS = {"target": TargetSettings, "prompts": PromptSettings, "generate": GenerateSettings}
_OPTIONAL = {
    "magpie": MagpieSettings,
    "draft": DraftSettings,
    "train": TrainSettings,
    "evaluate": EvaluateSettings,
}


def read_settings(path: Path, *, data: Path | None = None) -> DistillSettings:
    """Reads a configuration file; `data` overrides where the prompt files are.

    Raises:
      InputError: an unreadable file, or a bad section, key or value, with the section's name.
    """
    kinds = _SECTIONS | _OPTIONAL
    prefix, tables = f"config {path}:", read_toml(path, {*kinds})
    if path.stem in kinds:
        raise InputError(
            f"{prefix} the directory of its draft would be that of a stage, named like a section; "
            "rename the file"
        )
    sections = {
        name: read_section(kinds[name], tables.get(name, {}), f"{prefix} [{name}]")
        for name in {**_SECTIONS, **tables}
    }
    if ("draft" in tables) != ("train" in tables):
        raise InputError(f"{prefix} [draft] and [train] go together; give both or neither")
    prompts, train, evaluate = sections["prompts"], sections.get("train"), sections.get("evaluate")
    if sections.get("magpie") is not None and not prompts.train:
        raise InputError(
            f"{prefix} [magpie] writes prompts beside those of files; list at least one in train "
            "of [prompts]"
        )
    if train is not None and not prompts.train:
        raise InputError(
            f"{prefix} [prompts] train is empty; list at least one file of prompts, or leave "
            "[draft] and [train] out to evaluate drafts alone"
        )
    if train is not None and train.compares and not sections["generate"].top_n:
        raise InputError(
            f"{prefix} [generate] top_n = 0 keeps no probabilities, which kl and acceptance of "
            '[train] need; raise it, set probabilities = "live", or train on cross_entropy alone'
        )
    held_out = [entry.set for entry in prompts.held_out]
    for key in ("sets", "apart") if evaluate is not None else ():
        for name in getattr(evaluate, key):
            if name not in held_out:
                raise InputError(
                    f"{prefix} [evaluate] {key}: {name!r} is not held out; held_out of [prompts] "
                    f"lists {', '.join(sorted(held_out))}"
                )
    if evaluate is not None and {*(evaluate.sets or held_out)} <= {*evaluate.apart}:
        raise InputError(f"{prefix} [evaluate] apart leaves no set for the mean; shorten it")
    directory = path.parent / prompts.directory if data is None else data
    return DistillSettings(name=path.stem, directory=directory, **sections)


_FREE = {
    *("target.source", "target.name", "prompts.directory"),
    *("magpie.processes", "generate.processes"),
    *("train.devices", "train.keep", "train.save_every", "train.max_seconds", "draft.store"),
    *("evaluate.apart", "evaluate.ks", "evaluate.budgets", "evaluate.repeats"),
}
"""Keys that results do not depend on: where things are, how a run goes, what is shown of it."""


def determining_values(section: str, settings: Any) -> dict[str, Any]:
    """What a stage's results depend on: each key with its section's name, and its JSON value."""
    values = {f"{section}.{name}": value for name, value in vars(settings).items()}
    determining = {key: value for key, value in values.items() if key not in _FREE}
    return json.loads(json.dumps(determining, default=str))  # entries as texts, tuples as lists
