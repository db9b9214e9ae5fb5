"""Settings of an engine, checked together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Unpack

from ssd_jax.config.derived import DerivedSettings
from ssd_jax.config.keywords import ConfigSettings
from ssd_jax.config.refusals import check_together
from ssd_jax.config.refusals.placement import check_cores, check_workers
from ssd_jax.config.vllm_names import NAMES
from ssd_jax.options.fields import immutable, with_field_help
from ssd_jax.options.other_names import accept_names
from ssd_jax.placement.parallel.layout import Layout
from ssd_jax.placement.placement import Placement, place


@accept_names(NAMES)
@immutable
@with_field_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DerivedSettings):
    """Which model runs, how, and with what room.

    Raises:
      InputError: a value that is unknown, out of range, or in conflict with another.
    """

    if TYPE_CHECKING:

        def __init__(self, **_settings: Unpack[ConfigSettings]) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        check_together(self)

    def place_draft(self) -> Placement:
        """Where both roles run; starts JAX if it has to look at the devices.

        Raises:
          InputError: devices that do not exist.
        """
        placement = place(
            self.placement_kind,
            self.device_groups,
            self.grid,
            self.draft_addresses,
            workers=self.workers,
            hosts=self.hosts is not None,
        )
        check_workers(self, placement)
        if self.workers > 1:
            layout = self.layout if placement.out_of_process else Layout(self.workers, 1)
            placement = dataclasses.replace(placement, layout=layout)
        check_cores(self, placement)
        return placement
