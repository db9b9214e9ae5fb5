"""What goes in and out of the programs that expand a draft's records into branches."""

from __future__ import annotations

from typing import NamedTuple

import jax

from ssd_jax.devices.record import Record


class Expansion(NamedTuple):
    """M branches of each of B records.

    Attributes:
      records: [B * M] what the branches speculate; their lengths count the tokens so far.
      path: [B * M, K + 1] int32, tokens after the record's pending one that lead to the branch,
        the bonus token last, padded with -1.
    """

    records: Record
    path: jax.Array
