"""What an engine and its draft worker agree on first: the sizes of all later messages."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from typing_extensions import override

from ssd_jax.roles.drafting import MAX_NODES, Drafting
from ssd_jax.sampling.rules import RULES, RuleName
from ssd_jax.wire.fields import MAX_INT, Count, Text, within


class DraftMessage(
    msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True
):
    """Base of all messages."""

    def check(self, spec: DraftSpec) -> None:
        """Raises: ProtocolError: the parts fit, but not each other."""


class DraftSpec(DraftMessage, frozen=True, kw_only=True):
    """What a draft is, and what it is loaded with; the same at both ends. Opens a stream.

    A worker that the engine has started also gets it at its start, and the two must be equal.

    Attributes:
      model: `OpenedModel.identity` of the draft.
      slots, context, tokens: B, most positions of a sequence, number of token ids.
      drafting: K, and the rest that its programs are compiled for; its `branches` are those of all
        workers that share a slot.
      budgets: numbers of branches to load programs for; the largest is M.
      dtype: the dtype that the draft computes in.
      attention, draft_temperature: see `Config`.
      page_size, pages: positions of a page, and number of pages that slots share; 0 where each slot
        has one page.
      batch_sizes, batches_at_start: slots of batches that programs are made for besides all, and
        whether they are compiled at once.
      batch_patience: seconds of rounds that want a size before it is compiled.
    """

    model: Text
    slots: Count
    context: Count
    tokens: Count
    drafting: Drafting
    budgets: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=32)]
    dtype: Text
    attention: Text = "auto"
    draft_temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    page_size: Count = 0
    pages: Count = 0
    batch_sizes: Annotated[tuple[Count, ...], Meta(max_length=32)] = ()
    batches_at_start: bool = False
    batch_patience: Annotated[float, Meta(ge=0, le=1e6)] = 5.0

    @property
    def k(self) -> int:
        """K: most tokens of a record or branch."""
        return self.drafting.k

    @property
    def branches(self) -> int:
        """M: most branches a slot."""
        return max(self.budgets)

    @property
    def nodes(self) -> int:
        """Nodes of a tree; 0 where proposals are chains."""
        return self.drafting.nodes

    @property
    def support(self) -> int:
        """N: number of ids of q that a proposal ships; 1 where its rule needs no q."""
        return self.drafting.support if RULES[self.rule].ships_q else 1

    @property
    def rule(self) -> RuleName:
        """Rule of verification."""
        return self.drafting.rule

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by their names in `Entries`."""
        return {
            "B": self.slots,
            "C": self.context,
            "V": self.tokens,
            "K": self.k,
            "K+1": self.k + 1,
            "T": self.nodes or self.k,
            "T+1": (self.nodes or self.k) + 1,
            "nodes": self.nodes,
            "trees": self.branches if self.nodes else 0,
            "M": self.branches,
            "M+1": self.branches + 1,
            "N": self.support,
        }

    @override
    def check(self, spec: DraftSpec) -> None:
        for name in ("k", "support", "branches"):
            within(name, getattr(self.drafting, name), MAX_INT)
        within("nodes", self.nodes, MAX_NODES + 1)

    def difference(self, other: DraftSpec) -> str | None:
        """The first field in which another spec differs, and both values; None if none does."""
        other_fields, fields = other.fields(), self.fields()
        for name, value in fields.items():
            if other_fields[name] != value:
                return f"{name} is another: {value!r}, not {other_fields[name]!r}"
        return None

    def fields(self) -> dict[str, Any]:
        """All fields by name, those of `drafting` among them."""
        fields = msgspec.structs.asdict(self)
        return fields | dataclasses.asdict(fields.pop("drafting"))
