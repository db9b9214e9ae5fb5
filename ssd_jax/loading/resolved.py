"""What an engine runs with: settings as given, and what follows from them and the checkpoints."""

from __future__ import annotations

import dataclasses

from ssd_jax.config.config import Config
from ssd_jax.config.settings import AUTO_WIDTHS, SUPPORT
from ssd_jax.devices.opening.models import OpenedModel
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.loading.custom import Custom
from ssd_jax.placement.placement import Placement
from ssd_jax.roles.drafting import TreeShape
from ssd_jax.speculation.fan_out import FanOut


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """Everything that settings leave open, decided.

    Attributes:
      config: the settings as the user gave them.
      placement: of target and draft.
      target, draft: the opened models; no draft where there is none, or it is no model.
      draft_source: source of the draft, a name of `TEXT_DRAFTS`, that of an object, or None.
      dtype, draft_dtype: compute dtypes; None without a draft model.
      ks: values of K to prepare, ascending; empty without a draft.
      budgets: values of M to prepare, ascending; empty without branches.
      context: most positions of a sequence.
      paging: pages that slots share; None if each slot has a page of its own.
      custom: what makes draft and policies that are objects.
      nodes: of a tree of proposed tokens; 0 with chains. One that is chosen by measured costs is
        known only then.
    """

    config: Config
    placement: Placement
    target: OpenedModel
    draft: OpenedModel | None
    draft_source: str | None
    dtype: str
    draft_dtype: str | None
    ks: tuple[int, ...]
    budgets: tuple[int, ...]
    context: int
    paging: Paging | None = None
    custom: Custom = Custom()  # noqa: RUF009 (immutable)
    nodes: int = 0

    @property
    def branches(self) -> int:
        """The largest M; 0 without branches."""
        return max(self.budgets, default=0)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of proposed tokens that verifications are prepared for, ascending."""
        return tuple(sorted({0, *self.ks, *(AUTO_WIDTHS if self.config.chooses_k else ())}))

    def tree(self, k: int) -> TreeShape | None:
        """The size of trees with paths of up to K = k tokens; None where chains are proposed."""
        ancestors = k if self.branches else 0
        return TreeShape(nodes=self.nodes, depth=k, ancestors=ancestors) if self.nodes else None

    @property
    def chooses(self) -> bool:
        """Whether mode, K, M or a tree is chosen by measured costs."""
        config = self.config
        return (
            config.mode == "auto"
            or config.chooses_k
            or config.chooses_tree
            or len(self.budgets) > 1
        )

    @property
    def _opened(self) -> list[OpenedModel]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def window(self) -> int | None:
        """Most tokens that a layer of either model sees; None if some layer sees all."""
        windows = [opened.model.config.mechanisms.widest_window for opened in self._opened]
        return max(window or 0 for window in windows) if all(windows) else None

    @property
    def support(self) -> int:
        """Number of ids that a proposal's q keeps: no more than either model has outputs."""
        setting = self.config.proposal_support
        num_outputs = min(opened.model.config.outputs for opened in self._opened)
        if setting == "full":
            return num_outputs
        return min(SUPPORT if setting is None else int(setting), num_outputs)

    @property
    def engines(self) -> list[tuple[str, int]]:
        """Mode and K of the engines that there will be at least."""
        return [(self.config.prepared, k) for k in self.ks] or [("ar", 0)]

    def fan_out(self, k: int) -> FanOut:
        """A new fan-out policy for K = k.

        Raises:
          InputError: a list that does not fit.
        """
        if self.custom.fan_out is not None:
            return self.custom.new_fan_out()
        return self.config.fan_out_of(k, self.branches)

    @property
    def reads_confidence(self) -> bool:
        """Whether fan-outs read the draft's confidence."""
        ssd = self.config.prepared == "ssd"
        return ssd and self.fan_out(max(self.ks)).reads_confidence
