"""The product's engine, controller and cache over toy roles whose proposals are token trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.speculation.enumeration.host import Host
from tests.speculation.enumeration.host_roles import Clock, ToyDraft, ToyTarget
from tests.speculation.enumeration.rounds import block, coupled, ratio
from tests.speculation.enumeration.tree_roles import (
    Drawing,
    Order,
    Shape,
    TreeDraft,
    TreeTarget,
    by_place,
    by_position,
    from_leaves,
    recursively,
)


def always(*parents: int) -> Shape:
    """One shape for all trees."""
    return lambda _start: parents


JUDGES = {coupled: by_position, ratio: recursively, block: from_leaves}
"""How a rule judges trees."""

TWO_BY_TWO = always(0, 0, 1, 1)
"""Two children of the pending token, and of its first child."""


@dataclass(frozen=True, kw_only=True)
class TreeHost(Host):
    """An engine of mode ssd whose proposals are trees.

    Attributes:
      nodes: most of a tree.
      shape: of every tree.
      drawing, strict, order: see `tree_roles.TreeDraft`.
    """

    nodes: int = 4
    shape: Shape = TWO_BY_TWO
    backup: Any = "none"
    drawing: Callable[..., Drawing] = Drawing
    strict: bool = True
    order: Order = by_place

    def roles(self, noise: Any, clock: Clock) -> tuple[ToyTarget, ToyDraft]:
        by_noise = self.game.verify is coupled
        judge = JUDGES[self.game.verify]
        target = TreeTarget(
            self.game, noise, clock, slots=self.slots, chunk=self.chunk, judge=judge
        )
        draft = TreeDraft(
            self.game.draft,
            noise,
            clock,
            nodes=self.nodes,
            shape=self.shape,
            drawing=partial(self.drawing, keyed_by_position=by_noise),
            strict=self.strict,
            order=self.order,
            **self.draft_settings,
        )
        return target, draft
