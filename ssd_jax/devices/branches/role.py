"""What drafts that branch share on the devices of this process."""

from __future__ import annotations

import jax
import numpy as np
from typing_extensions import override

from ssd_jax.devices.paged_role import PagedRole
from ssd_jax.roles.protocols import BranchingDraft
from ssd_jax.roles.records import Promotion, no_promotion


class BranchingRole(PagedRole, BranchingDraft):
    """A draft's slots, whose promotions programs take with K + 1 committed tokens."""

    def _split(self, promotion: Promotion) -> list[Promotion]:
        """Promotions that only count committed tokens, before the one that has the last of them."""
        committed, width = promotion.committed, self.k + 1
        count = max(-(-committed.shape[1] // width), 1)
        padded = np.full((self.slots, count * width), -1, np.int32)
        padded[:, : committed.shape[1]] = committed
        *earlier, last = np.split(padded, count, axis=1)
        counting = no_promotion(self.slots, self.k, nodes=self.nodes)
        return [
            *(counting._replace(committed=part) for part in earlier),
            promotion._replace(committed=last),
        ]

    def finish(self) -> None:
        """Waits for all that was asked."""
        jax.block_until_ready(self._pages)

    @override
    def close(self) -> None:
        """Devices free the arrays with the last reference to them."""
