"""What can be refused before any text is read: what fits neither the target nor the devices."""

from __future__ import annotations

import jax

from ssd_jax.checkpoints.draft_checkpoint import DraftTarget
from ssd_jax.distill.training.packing import Packed
from ssd_jax.distill.training.settings import DraftSettings, TrainSettings
from ssd_jax.distill.training.vocabulary import check_output_size
from ssd_jax.errors import InputError


def check(settings: TrainSettings, draft: DraftSettings, target: DraftTarget) -> None:
    """Refuses a draft that the target cannot have, and batches that the devices cannot share.

    Raises:
      InputError: the value, what it may be, and what to change.
    """
    draft.config(target.checkpoint.config)
    tokenizer = target.tokenizer
    if draft.output_size:
        always = tokenizer.eos_ids | tokenizer.special_ids
        check_output_size(draft.output_size, size=tokenizer.size, always=always)
    _check_batch(settings, min(settings.devices or jax.device_count(), jax.device_count()))


def check_probabilities(settings: TrainSettings, packed: Packed, where: str) -> None:
    """Refuses texts without the probabilities that the losses need.

    Raises:
      InputError: there are none; `where` names the texts.
    """
    wanted = settings.kl > 0 or settings.acceptance > 0
    if settings.probabilities == "cached" and wanted and not packed.width:
        raise InputError(
            f"{where}: no cached probabilities, which kl and acceptance need; generate with "
            'top_n above 0, set probabilities = "live", or train on cross_entropy alone'
        )


def _check_batch(settings: TrainSettings, devices: int) -> None:
    if settings.devices > devices:
        raise InputError(
            f"devices = {settings.devices}, but there are {devices}; set 0 for all of them"
        )
    micro = settings.batch // settings.accumulation
    if micro % devices:
        raise InputError(
            f"batch / accumulation = {micro} rows do not spread evenly over {devices} devices; "
            "change batch or accumulation, or set devices"
        )
