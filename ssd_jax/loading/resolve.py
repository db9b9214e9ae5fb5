"""Decides what settings leave open, from the checkpoints and this machine's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ssd_jax.checkpoints.drafts.shipped import draft_source
from ssd_jax.checkpoints.opening import dtype_of_draft
from ssd_jax.checkpoints.tokenizers.tokenizer import require_tokens
from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.config.config import Config
from ssd_jax.devices.opening.auto_dtype import auto_dtype
from ssd_jax.devices.opening.models import OpenedModel, open_model
from ssd_jax.errors import InputError
from ssd_jax.loading.context import fitting_context
from ssd_jax.loading.custom import Custom
from ssd_jax.loading.paging import paging_of
from ssd_jax.loading.resolved import Resolved
from ssd_jax.placement.placement import Placement
from ssd_jax.speculation.text_drafts import TEXT_DRAFTS


def resolve(
    config: Config,
    placement: Placement,
    ks: Sequence[int] = (),
    progress: Progress | None = None,
    custom: Custom = Custom(),  # noqa: B008 (immutable)
) -> Resolved:
    """Opens the models, which loads no weights, and decides what the settings leave open.

    Args:
      placement: see `Config.place_draft`.
      ks: values of K to prepare besides the configured one.
      progress: of downloads.
      custom: the draft and the policy, where they are objects.

    Raises:
      InputError: checkpoints that cannot be used, or settings that do not fit them or the memory.
    """
    dtype = config.dtype
    if dtype == "auto":
        dtype = auto_dtype(config.target, placement.target, progress=progress)
    nodes = 0 if config.chooses_tree else max(config.trees, default=0)
    target = open_model(
        config.target,
        dtype,
        bitwise=config.exact == "bitwise",
        trees=nodes > 0 and config.exact != "distribution",
        attention=config.attention,
        mesh=placement.target,
        expert_parallel=config.expert_parallel,
        page_size=config.page_size,
        context=config.context,
        progress=progress,
    )
    attention = target.model.execution.attention
    if nodes and config.exact == "bitwise" and attention != "cpu":
        raise InputError(
            f"exact = 'bitwise' is not possible with tree_nodes = {nodes} and "
            f"attention = {attention!r}, which sums along a path in another order than along a "
            "text; leave out one"
        )
    source, draft_dtype, draft = config.draft, None, None
    if source is not None and custom.draft is None:
        source = draft_source(source, lambda: target.checkpoint, TEXT_DRAFTS)
    if source is not None and config.draft_model is not None:
        draft_dtype = config.draft_dtype or dtype_of_draft(
            source, dtype, platform=placement.draft_platform, progress=progress
        )
        draft = _open_draft(config, placement, source, draft_dtype, target, progress)
    ks = tuple(sorted({*ks, config.speculated} - {0}))
    budgets = config.budgets_at(placement.kind)
    if config.prepared == "ssd" and custom.fan_out is None:
        for k in ks:
            config.fan_out_of(k, max(budgets))  # checks
    resolved = Resolved(
        config=config,
        placement=placement,
        target=target,
        draft=draft,
        custom=custom,
        draft_source=source,
        dtype=dtype,
        draft_dtype=draft_dtype,
        ks=ks,
        budgets=budgets,
        context=_context(config, target, draft, ks),
        nodes=nodes,
    )
    return dataclasses.replace(resolved, paging=paging_of(resolved))


def _open_draft(
    config: Config,
    placement: Placement,
    source: str,
    dtype: str,
    target: OpenedModel,
    progress: Progress | None,
) -> OpenedModel:
    draft = open_model(
        source,
        dtype,
        attention=config.attention,
        mesh=placement.draft,
        page_size=config.page_size,
        context=config.context,
        target=target.checkpoint,
        tokens=target.tokenizer.size,
        progress=progress,
    )
    require_tokens(target.tokenizer, draft.tokenizer, target_name=target.source, draft_name=source)
    return draft


def _context(
    config: Config, target: OpenedModel, draft: OpenedModel | None, ks: Sequence[int]
) -> int:
    models = [target] if draft is None else [target, draft]
    limits = {model.source: model.checkpoint.config.max_context for model in models}
    return fitting_context(config, limits, ks)
