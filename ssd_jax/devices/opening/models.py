"""Opens models, which finds and checks them but loads no weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.checkpoints.weights.load import check_tensors, load_parameters
from ssd_jax.checkpoints.weights.native import native_groups, native_kinds
from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.devices.opening.exactness import row_independent
from ssd_jax.errors import InputError
from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.experts.api import backend_for as experts_backend_for
from ssd_jax.kernels.head_shards import Kernels
from ssd_jax.kernels.linear import api as products
from ssd_jax.kernels.tree_attention import api
from ssd_jax.kernels.tree_attention.api import backends
from ssd_jax.kernels.tree_attention.cpu import POSITIONS
from ssd_jax.kernels.verify.api import backend_for
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel

_TENSORS = 64  # most tensors whose first row is read


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """Everything about a model except its weights."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    model: FunctionalModel

    @property
    def source(self) -> str:
        """The model as the user named it."""
        return self.checkpoint.source

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of configuration and vocabulary.

        For a draft checkpoint it covers its target, output ids and own weights too.
        """
        size = self.tokenizer.size
        tokens = "\0".join(str(self.tokenizer.token(token)) for token in range(size))
        identity = f"{self.checkpoint.config!r}\0{tokens}"
        if self.checkpoint.target_digest is not None:
            ids = self.checkpoint.output_ids
            identity += (
                f"\0{self.checkpoint.target_digest}\0{None if ids is None else ids.tolist()}"
            )
        if self.checkpoint.digest is not None:
            identity += f"\0{self.checkpoint.digest()}"
        return hashlib.sha256(identity.encode()).hexdigest()

    @property
    def identity(self) -> str:
        """What two processes with this model must agree on, and costs and acceptance belong to.

        Raises:
          InputError: tensor data that cannot be read.
        """
        return f"{self.fingerprint} {self.weights}"

    @functools.cached_property
    def weights(self) -> str:
        """Digest of how the weights are stored, and of the first rows of some tensors of each kind.

        Raises:
          InputError: tensor data that cannot be read.
        """
        tensors = self.checkpoint.tensors
        loaded = tensors.shapes.keys() & self.model.checkpoint_structs().keys()
        names = sorted(loaded, key=lambda name: name[::-1])  # by kind, then by layer
        layout = [(name, tensors.shape(name), tensors.stored_type(name)) for name in names]
        digest = hashlib.sha256(repr(layout).encode())
        for name in names[:: -(-len(names) // _TENSORS) or 1]:
            row = tensors.read(name, (slice(0, 1),) * max(1, len(tensors.shape(name)) - 1))
            digest.update(np.ascontiguousarray(row).view(np.uint8).data)
        return digest.hexdigest()

    def load(self, progress: Progress | None = None) -> list[jax.Array]:
        """Loads the parameters.

        Raises:
          InputError: tensor data that cannot be read.
        """
        path = str(self.checkpoint.path)
        return load_parameters(self.checkpoint.tensors, self.model, where=path, progress=progress)


def execution_for(
    platform: str,
    dtype: str,
    head_dim: int,
    *,
    device: Any,
    devices: int = 1,
    attention: str = "auto",
    page_size: int | None = None,
    vocab: int | None = None,
) -> Execution:
    """How to execute a model, with the platform's own kernels where they support it.

    Args:
      dtype: compute dtype.
      head_dim: of the model.
      device: of JAX, one of the devices that share the model.
      devices: number of those devices.
      attention, page_size: see `Config`.
      vocab: number of logits of a position, of a model that verifies.

    With `attention` "xla", an accelerator has no kernels by Pallas at all.

    Raises:
      InputError: attention that is asked for by name and is not possible.
    """
    linear = products.backend(platform, dtype, devices=devices)
    for_platform = partial(
        Execution.for_platform,
        platform,
        dtype,
        linear=linear,
        blocks=products.stored_in_blocks(device),
    )
    choices = backends(platform, devices=devices, requested=attention)
    *preferred, last = [for_platform(attention=name) for name in choices]
    why_not = partial(
        why_unread, head_dim=head_dim, device=device, size=page_size or kv_pages.BLOCK
    )
    chosen = next((execution for execution in preferred if why_not(execution) is None), last)
    plain = attention == "xla" and platform != "cpu"
    if not plain:
        experts = experts_backend_for(platform, device)
        chosen = dataclasses.replace(chosen, experts=experts)
    if vocab is None:
        return chosen
    verify = "xla" if plain else backend_for(platform, vocab, device, devices)
    return dataclasses.replace(chosen, verify=verify)


def why_unread(
    execution: Execution,
    head_dim: int,
    device: Any,
    *,
    attention: str | None = None,
    size: int = kv_pages.BLOCK,
) -> str | None:
    """Why attention cannot read a model's pages on a device, in one line; None if it can.

    Args:
      attention: None is the attention of `execution`.
      size: positions a page.
    """
    page = jax.ShapeDtypeStruct((1, 1, size, execution.page_width(head_dim)), execution.pages)
    return api.why_unsupported(attention or execution.attention, head_dim, page, device)


def device_of(model: FunctionalModel) -> Any:
    """One of a model's JAX devices."""
    return jax.devices()[0] if model.mesh is None else model.mesh.devices.flat[0]


def check_page_size(model: FunctionalModel, size: int) -> None:
    """Checks that a model's attention takes pages of `size` positions.

    Raises:
      InputError: it does not.
    """
    execution, head_dim = model.execution, model.config.head_dim
    if size % POSITIONS and execution.attention == "cpu":
        raise InputError(
            f"page_size = {size} is no multiple of {POSITIONS}, which attention on this processor "
            "takes together; give one, or `attention='xla'`"
        )
    reason = why_unread(execution, head_dim, device_of(model), size=size)
    if reason is not None:
        raise InputError(
            f"attention = {execution.attention!r} does not take {reason}; change it, or give "
            "`attention='xla'`"
        )


def check_paging(model: FunctionalModel, size: int, *, slots: int, context: int) -> None:
    """Checks that a model's attention takes a table of such pages for all slots.

    Raises:
      InputError: it does not.
    """
    check_page_size(model, size)
    if model.execution.attention != "pallas_tpu":
        return
    from ssd_jax.kernels.tree_attention.pallas_tpu import why_no_table

    reason = why_no_table(slots // model.data_shards, -(-context // size))
    if reason is not None:
        raise InputError(
            f"page_size = {size} is too small for slots = {slots} of context = {context}: {reason}"
            "; raise `page_size`, or lower one of them"
        )


def open_model(
    source: str,
    dtype: str,
    *,
    bitwise: bool = False,
    trees: bool = False,
    attention: str = "auto",
    mesh: Mesh | None = None,
    expert_parallel: bool = False,
    page_size: int | None = None,
    context: int | None = None,
    target: Checkpoint | None = None,
    tokens: int = 0,
    progress: Progress | None = None,
) -> OpenedModel:
    """Finds a model, downloads it if need be, and checks that it can run.

    Args:
      source: see `Config.target`.
      dtype: compute dtype.
      bitwise: see `exactness`.
      trees: whether the model verifies trees, bitwise where that costs no speed, so that attention
        uses no AMX tiles.
      attention, expert_parallel, page_size, context: see `Config`.
      mesh: devices of the model; None is the default one.
      target: of a draft, see `open_checkpoint`.
      tokens: number of ids that a draft is given, which may be more than it embeds.
      progress: of the download.

    Raises:
      InputError: a checkpoint that cannot be used, or attention that is not possible here.
    """
    platform = jax.default_backend()
    device, devices = (jax.devices()[0], 1) if mesh is None else (mesh.devices.flat[0], mesh.size)
    backends(platform, devices=devices, requested=attention)  # before anything is read
    checkpoint = open_checkpoint(source, target=target, progress=progress)
    config = checkpoint.config.for_context(context)
    if config != checkpoint.config:
        checkpoint = dataclasses.replace(checkpoint, config=config)
    execution = execution_for(
        platform,
        dtype,
        checkpoint.config.head_dim,
        device=device,
        devices=devices,
        attention=attention,
        page_size=page_size,
        vocab=checkpoint.config.vocab_size,
    )
    if expert_parallel and mesh is None:
        raise InputError(
            "expert_parallel = true is for a model on several devices, and this is on one; give "
            "mesh, or leave it out"
        )
    if tokens > checkpoint.config.vocab_size:
        execution = dataclasses.replace(execution, foreign_tokens=True)
    if bitwise:
        execution = row_independent(execution)
    if trees and execution.attention == "cpu":
        kernels = execution.kernels or Kernels()
        execution = dataclasses.replace(execution, kernels=kernels._replace(tiles=False))
    stored, groups, where = {}, {}, str(checkpoint.path)
    if dtype == "native" and execution.linear == "cpu":
        stored = native_kinds(checkpoint.tensors, where=where)
    elif dtype == "native":
        groups = native_groups(checkpoint.tensors, where=where)
    model = FunctionalModel(
        checkpoint.config,
        execution,
        mesh=mesh,
        output_ids=checkpoint.output_ids,
        stored=stored,
        groups=groups,
        expert_parallel=expert_parallel,
    )
    check_page_size(model, kv_pages.BLOCK)
    check_tensors(checkpoint.tensors, model.checkpoint_structs(), where)
    return OpenedModel(checkpoint, checkpoint.tokenizer, model)
