"""One step of training as one program: gradients over all devices and micro-batches, an update.

The output head is the widest product, and its logits would be the largest array by far: tokens go
through it `chunk` at a time, and each chunk's losses and gradients are done before the next. Tokens
that count come first, so that chunks of prompt and padding alone are skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.weights.load import load_parameters
from ssd_jax.kernels.linear.api import backend
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sequence import narrow_product, sequence_hidden, sequence_logits
from ssd_jax.models.sharding import DATA_AXIS
from ssd_jax.system.stored_jit import StoredJit
from ssd_jax.tools.distill.settings import TrainSettings
from ssd_jax.tools.distill.training.data import PackedBatch, columns_of
from ssd_jax.tools.distill.training.losses import Sums, Weights, from_all, from_top
from ssd_jax.tools.distill.training.model import Arrays, Draft


class TeacherRows(NamedTuple):
    """The target's probabilities at positions [n]; `hidden` is the live target's."""

    top_ids: jax.Array  # [n, N] int32
    top_probs: jax.Array  # [n, N] float32
    hidden: jax.Array  # [n, hidden] float32, or [n, 0]


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The target as training needs it.

    Attributes:
      live: the target's modules where it is run on every batch; None: cached probabilities.
      tokens: ids of the tokenizer; rows of the live target's head beyond them are padding.
    """

    live: FunctionalModel | None = None
    tokens: int = 0

    def rows(self, parameters: list[jax.Array], batch: PackedBatch) -> TeacherRows:
        """What is known of p at every position of a batch."""
        tokens, positions, segments, *_, ids, probs = map(jnp.asarray, batch)
        hidden = jnp.zeros((*tokens.shape, 0), jnp.float32)
        if self.live is not None:
            module = self.live.module(parameters)
            hidden = sequence_hidden(module, tokens, positions, segments)
        return TeacherRows(*(x.reshape(tokens.size, x.shape[-1]) for x in (ids, probs, hidden)))

    def losses(
        self,
        fixed: FixedArrays,
        rows: TeacherRows,
        logits: jax.Array,
        next_tokens: jax.Array,
        mask: jax.Array,
        weights: Weights,
    ) -> tuple[Sums, jax.Array]:
        """Losses of the draft's logits [n, V] and their gradient; see `losses.from_top`.

        `rows` and the ids `next_tokens` [n] are of the same positions.
        """
        columns = fixed.columns
        next_tokens = next_tokens if columns is None else columns[next_tokens]
        if self.live is None:
            top_columns = rows.top_ids if columns is None else columns[rows.top_ids]
            return from_top(logits, top_columns, rows.top_probs, next_tokens, mask, weights)
        target_logits = sequence_logits(self.live.module(fixed.target), rows.hidden)
        exists = jnp.arange(target_logits.shape[1]) < self.tokens
        p = jax.nn.softmax(jnp.where(exists, target_logits, -jnp.inf))
        largest = jnp.max(p, axis=1)
        if fixed.ids is not None:
            p = p[:, fixed.ids]
        return from_all(logits, p, largest, next_tokens, mask, weights)


def load_live(target: Checkpoint, *, tokens: int, compute: str) -> tuple[Teacher, list[jax.Array]]:
    """The target in the dtype `compute`, and its parameters; `tokens` as in `Teacher`.

    Raises:
      InputError: its data cannot be read.
    """
    platform = jax.default_backend()
    execution = Execution.for_platform(platform, compute, linear=backend(platform, compute))
    model = FunctionalModel(target.config, execution)
    parameters = load_parameters(target.tensors, model, where=str(target.path))
    return Teacher(model, tokens), parameters


_ROWS, _MICRO_ROWS = PartitionSpec(DATA_AXIS), PartitionSpec(None, DATA_AXIS)
"""Specs of batches: their rows are spread over the devices, or those of each micro-batch."""


class FixedArrays(NamedTuple):
    """What training does not change."""

    frozen: Arrays
    ids: jax.Array | None  # [N] int32, see `Draft.output_ids`
    columns: jax.Array | None  # [vocabulary] int32, see `data.columns_of`
    target: list[jax.Array]  # of the live target


class State(NamedTuple):
    """What training changes."""

    trained: Arrays
    optimizer: Any


class StepReport(NamedTuple):
    """What a step reports."""

    sums: Sums
    gradient_norm: jax.Array


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The programs of training, over the devices of a mesh along `DATA_AXIS`."""

    draft: Draft
    teacher: Teacher
    settings: TrainSettings
    mesh: Mesh

    def programs(self) -> tuple[Callable[..., tuple[State, StepReport]], Callable[..., Sums]]:
        """`step(state, fixed, batch)` and `measure(state, fixed, batch)`, which only measures.

        A step reuses the state's memory; its batch has a leading axis of micro-batches.
        """
        replicated = PartitionSpec()

        def over_devices(function: Callable[..., Any], batch: PartitionSpec) -> Callable[..., Any]:
            specs = {"in_specs": (replicated, replicated, batch), "out_specs": replicated}
            return jax.shard_map(function, mesh=self.mesh, check_vma=False, **specs)

        gradients = over_devices(self._gradients, _MICRO_ROWS)
        measure = over_devices(self._measure, _ROWS)

        def step(state: State, fixed: FixedArrays, batch: PackedBatch) -> tuple[State, StepReport]:
            sums, total = gradients(state.trained, fixed, batch)
            mean = jax.tree.map(lambda g: g / jnp.maximum(sums.positions, 1), total)
            updates, optimizer = self.optimizer.update(mean, state.optimizer, state.trained)
            trained: Any = optax.apply_updates(state.trained, updates)
            return State(trained, optimizer), StepReport(sums, optax.tree_utils.tree_norm(mean))

        return StoredJit(step, donate=(0,)), StoredJit(measure)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW after a limit on the gradient's norm."""
        s = self.settings
        return optax.chain(
            optax.clip_by_global_norm(s.clip),
            optax.adamw(
                schedule(s),
                b1=s.beta1,
                b2=s.beta2,
                weight_decay=s.weight_decay,
                mask=lambda arrays: jax.tree.map(lambda x: x.ndim > 1, arrays),
            ),
        )

    def first_state(self, trained: dict[str, np.ndarray]) -> State:
        """The state before the first step, on all devices."""
        placed = self.everywhere(trained)
        return State(placed, self.everywhere(self.optimizer.init(placed)))

    def fixed_arrays(self, frozen: dict[str, np.ndarray], target: list[jax.Array]) -> FixedArrays:
        """What does not change, on all devices."""
        ids = self.draft.output_ids
        columns = None if ids is None else columns_of(ids, self.draft.config.vocab_size)
        return self.everywhere(FixedArrays(frozen, ids, columns, target))  # type: ignore[return-value]

    def everywhere(self, tree: Any) -> Any:
        """A tree's arrays, replicated on every device."""
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))

    def spread(self, batch: PackedBatch, *, micro_batches: int | None = None) -> PackedBatch:
        """A batch with its rows spread over the devices, cut into micro-batches for a step."""
        rows = _ROWS
        if micro_batches is not None:
            rows = _MICRO_ROWS
            batch = PackedBatch(
                *(x.reshape(micro_batches, len(x) // micro_batches, *x.shape[1:]) for x in batch)
            )
        return jax.device_put(batch, NamedSharding(self.mesh, rows))

    def _gradients(
        self, trained: Arrays, fixed: FixedArrays, batch: PackedBatch
    ) -> tuple[Sums, Arrays]:
        """Sums of losses and of gradients over everything that counts in the whole batch."""

        def add(total: Any, micro: PackedBatch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, self._of_batch(trained, fixed, micro)), None

        first_batch = PackedBatch(*(leaf[0] for leaf in batch))
        if batch.tokens.shape[0] == 1:
            total = self._of_batch(trained, fixed, first_batch)
        else:
            structs = jax.eval_shape(self._of_batch, trained, fixed, first_batch)
            zeros = jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), structs)
            total, _ = jax.lax.scan(add, zeros, batch)
        return jax.lax.psum(total, DATA_AXIS)

    def _of_batch(
        self, trained: Arrays, fixed: FixedArrays, batch: PackedBatch
    ) -> tuple[Sums, Arrays]:
        head_name = self.draft.head
        body = {name: array for name, array in trained.items() if name != head_name}
        hidden, pull_back = jax.vjp(lambda body: self._hidden(body, trained, fixed, batch), body)
        sums, at_hidden, at_head = self._through_head(hidden, trained, fixed, batch)
        gradients = dict(pull_back(at_hidden)[0])
        if head_name in trained:
            gradients[head_name] = at_head
        return sums, gradients

    def _measure(self, state: State, fixed: FixedArrays, batch: PackedBatch) -> Sums:
        hidden = self._hidden(state.trained, state.trained, fixed, batch)
        sums, _, _ = self._through_head(hidden, state.trained, fixed, batch, learning=False)
        return jax.lax.psum(sums, DATA_AXIS)

    def _hidden(
        self, body: Arrays, trained: Arrays, fixed: FixedArrays, batch: PackedBatch
    ) -> jax.Array:
        """[n, hidden] float32 that the head's rows multiply, of the batch's tokens."""
        model = self.draft.model
        module = model.module(model.assemble({**fixed.frozen, **trained, **body}))
        hidden = sequence_hidden(
            module,
            *map(jnp.asarray, (batch.tokens, batch.positions, batch.segments)),
            compute=jnp.dtype(self.settings.compute),
            rematerialise=self.settings.rematerialise,
        )
        normed = module.model.norm(hidden.reshape(-1, hidden.shape[-1]))
        factor = model.config.mechanisms.multipliers.logits
        return normed if factor == 1 else normed * factor

    def _through_head(
        self,
        hidden: jax.Array,
        trained: Arrays,
        fixed: FixedArrays,
        batch: PackedBatch,
        *,
        learning: bool = True,
    ) -> tuple[Sums, jax.Array, jax.Array]:
        """Sums of losses, and gradients at hidden [n, hidden] and at the head (or a zero).

        Without `learning` both gradients are zeros, and no product is spent on them.
        """
        head = trained.get(self.draft.head, fixed.frozen.get(self.draft.head))
        assert head is not None
        learns = learning and self.draft.head in trained
        # A trained head is cast in each chunk, so that its gradients add up in float32.
        compute = jnp.dtype(self.settings.compute)
        narrow = head if learns else head.astype(compute)
        weights = Weights(*(getattr(self.settings, name) for name in Weights._fields))
        count, chunk = hidden.shape[0], min(self.settings.chunk, hidden.shape[0])
        mask = jnp.asarray(batch.loss_mask).reshape(-1)
        order = jnp.argsort(~mask, stable=True)
        chunks = -(-count // chunk)

        def into_chunks(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x[order], ((0, chunks * chunk - count), *((0, 0),) * (x.ndim - 1)))
            return padded.reshape(chunks, chunk, *x.shape[1:])

        def product(x: jax.Array, weight: jax.Array) -> Any:
            return narrow_product(x, weight, compute)

        def run(chunk_args: tuple[jax.Array, TeacherRows, jax.Array, jax.Array]):
            x, rows, next_tokens, chunk_mask = chunk_args
            logits, pull_back = jax.vjp(product, x, narrow)
            sums, gradient = self.teacher.losses(
                fixed, rows, logits, next_tokens, chunk_mask, weights
            )
            if not learning:
                return sums, jnp.zeros_like(x), jnp.zeros(())
            at_x, at_head = pull_back(gradient)
            return sums, at_x, at_head if learns else jnp.zeros(())

        def skip(chunk_args: tuple[jax.Array, TeacherRows, jax.Array, jax.Array]):
            zeros = jnp.zeros(narrow.shape if learns else ())
            return (
                Sums(*(jnp.zeros(()) for _ in Sums._fields)),
                jnp.zeros_like(chunk_args[0]),
                zeros,
            )

        def body(total: tuple[Sums, jax.Array], chunk_args: Any):
            sums, at_x, at_head = jax.lax.cond(jnp.any(chunk_args[3]), run, skip, chunk_args)
            return jax.tree.map(jnp.add, total, (sums, at_head)), at_x

        next_tokens = jnp.asarray(batch.next_tokens).reshape(-1)
        teacher_rows = self.teacher.rows(fixed.target, batch)
        chunk_args = jax.tree.map(into_chunks, (hidden, teacher_rows, next_tokens, mask))
        zeros = skip(jax.tree.map(lambda x: x[0], chunk_args))
        (sums, at_head), at_x = jax.lax.scan(body, (zeros[0], zeros[2]), chunk_args)
        at_x = at_x.reshape(-1, hidden.shape[1])[:count]
        return sums, jnp.zeros_like(hidden).at[order].set(at_x), at_head


def schedule(settings: TrainSettings) -> optax.Schedule:
    """Learning rate by step: linear from 0, then a cosine."""
    s = settings
    warmup = min(s.warmup, s.steps - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=s.learning_rate / (warmup + 1),  # a first step of size 0 would be wasted
        peak_value=s.learning_rate,
        warmup_steps=warmup,
        decay_steps=s.steps,
        end_value=s.learning_rate * s.final_rate,
    )


def mesh_of(devices: int) -> Mesh:
    """A mesh of that many devices (0: all) in a row."""
    devices_used = jax.devices()[: devices or None]
    return Mesh(np.array(devices_used), (DATA_AXIS,))
