"""Tokens that several continuations of a text share, and their keys and values."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Int32, Shaped

BranchArray = Shaped[Array, "B kv_heads entries M width"]
"""Keys and values of branch tokens of one layer, as in `Scratch`."""

AllBranches = Shaped[Array, "layers B kv_heads entries M width"]
"""Those of all layers. (They and the pages are one array each: a call takes the host a microsecond
or two for each array.)"""


class Tree(NamedTuple):
    """Tokens of which some belong to branches that leave the trunk at different positions.

    Attributes:
      branches: keys and values of the branches so far.
      paths: see `Scratch`; path 0 is a token of the trunk.
      write_positions: position in the pages that a token is written to; one outside is not written.
    """

    branches: AllBranches
    paths: Int32[Array, "B R 2"]
    write_positions: Int32[Array, "B R"]
