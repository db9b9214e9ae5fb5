"""A loaded target, and perhaps a draft, from whose weights and programs engines are made."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax

from ssd_jax.config.config import Config
from ssd_jax.devices.branching_draft import BranchingMenu
from ssd_jax.devices.draft.drafter import ModelDrafter
from ssd_jax.devices.opening.fallbacks import Fallbacks
from ssd_jax.devices.programs.paged import PagedPrograms
from ssd_jax.devices.target import logprob_programs, masked_programs
from ssd_jax.devices.target.programs import Programs
from ssd_jax.devices.target.target import DeviceTarget
from ssd_jax.devices.trees.drafter import TreeDrafter
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.loading.drafts import EngineDrafts, InlineDraft
from ssd_jax.loading.resolved import Resolved
from ssd_jax.placement.host_branching import HostBranchingDraft
from ssd_jax.placement.hosts.follower import Follower
from ssd_jax.placement.hosts.leader import Leader
from ssd_jax.placement.hosts.mirror import MirroredDrafter, MirroredTarget
from ssd_jax.roles.drafting import TreeShape
from ssd_jax.roles.protocols import Drafter, Target
from ssd_jax.speculation.rank_rates import RankRates
from ssd_jax.speculation.tuned_drafter import TunedDrafter
from ssd_jax.speculation.tuner import Tuner

if TYPE_CHECKING:
    from ssd_jax.placement.process.placement import DraftWorker
    from ssd_jax.placement.process.workers import DraftWorkers
    from ssd_jax.sampling.params import Extra, SamplingParams
    from ssd_jax.system.compile_cache import ProgramStore


@dataclasses.dataclass(frozen=True)
class Roles:
    """The two roles of one engine.

    Attributes:
      close: closes the roles; followers give theirs up too.
    """

    target: Target
    drafter: Drafter | None
    close: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """Programs and parameters that all engines share.

    Attributes:
      inline: the draft in this process; None without a draft model.
      worker: runs the draft of mode ssd, if that is not in this process.
      fallbacks: what holds in place of what was expected.
      tuner: makes the tuner of a mode and K, where K or M is chosen while decoding.
      rank_rates: makes the rates that trees of an engine are shaped by.
      hosts: the other processes, where several have the target's devices.
      store: where compiled programs are kept.
    """

    resolved: Resolved
    programs: Programs
    parameters: list[jax.Array]
    inline: InlineDraft | None
    worker: DraftWorker | DraftWorkers | None
    fallbacks: Fallbacks
    tuner: Callable[[str, int], Tuner] | None = None
    rank_rates: Callable[[TreeShape], RankRates] = RankRates
    hosts: Leader | Follower | None = None
    store: ProgramStore | None = None
    _load_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    _custom_drafts: list[HostBranchingDraft] = dataclasses.field(default_factory=list)
    _loaded_extras: set[Extra] = dataclasses.field(default_factory=set)  # loaded in all processes

    @property
    def config(self) -> Config:
        """The settings as given."""
        return self.resolved.config

    @property
    def exact(self) -> str:
        """The exactness that holds, "bitwise" or "distribution"."""
        return self.fallbacks.exact

    @property
    def grows(self) -> bool:
        """Whether texts get pages as they grow.

        Such a text may have to be run again, by other programs than those of its rounds, which
        bitwise mode does not allow.
        """
        return self.programs.paging is not None and self.exact == "distribution"

    @property
    def drafts(self) -> EngineDrafts:
        """Makes the drafts of engines."""
        return EngineDrafts(
            resolved=self.resolved,
            programs=self.programs,
            inline=self.inline,
            worker=self.worker,
            tuner=self.tuner,
            rank_rates=self.rank_rates,
            grows=self.grows,
            custom=self._custom_drafts,
        )

    def new_stock(self) -> PageStock | None:
        """Free pages for an engine whose slots share them."""
        programs, grain = self.programs, 0
        if programs.paging is None:
            return None
        if self.config.prefix_caching is not False:
            # With whole chunks the same programs run a prompt, whatever others have filled.
            chunks = programs.model.execution.prefill_chunks
            chunk = 1 if self.exact == "distribution" else max(chunks)
            grain = math.lcm(programs.paging.size, chunk)
        return PageStock(
            slots=programs.slots,
            count=programs.paging.total,
            size=programs.paging.size,
            beyond=programs.verification.widths[-1] + 1,
            context=programs.context,
            groups=programs.model.data_shards,
            grain=grain,
            grows=self.grows,
            window=self.resolved.window,
        )

    def roles(self, mode: str, k: int, *, patience: float | None = None) -> Roles:
        """New roles with empty slots for a mode with up to k proposed tokens a round.

        Args:
          patience: of a draft of mode ssd; see `EngineDrafts.branching`.
        """
        config, tuner = self.config, None
        chooses = config.mode == "auto" or config.chooses_k
        learns = chooses or (config.chooses_tree and not self.resolved.nodes)
        if self.tuner is not None and mode == "sd" and learns:
            tuner = self.tuner(mode, k)  # before the roles: it may measure, with roles of its own
        if isinstance(self.hosts, Leader):
            roles = self._mirrored_roles(self.hosts, mode, k)
        else:
            roles = self._local_roles(mode, k)
        # Where the draft of mode ssd runs beside the leader, followers have none.
        if mode == "ssd" and not isinstance(self.hosts, Follower):
            return dataclasses.replace(roles, drafter=self.drafts.controller(k, patience))
        if tuner is None or roles.drafter is None:
            return roles
        # Followers are told the batch as the tuner has changed it.
        drafter = TunedDrafter(roles.drafter, tuner, rule=config.verify, fixed=not chooses)
        return dataclasses.replace(roles, drafter=drafter)

    def _local_roles(self, mode: str, k: int) -> Roles:
        """A target, with a drafter in mode sd."""
        target = DeviceTarget(self.programs, self.parameters)
        return Roles(target, self.drafts.plain(k) if mode == "sd" else None)

    def _mirrored_roles(self, leader: Leader, mode: str, k: int) -> Roles:
        """`_local_roles`, with calls that followers repeat.

        A drafter that uses no device runs on the leader alone.
        """
        engine, roles = leader.new_engine(mode, k, lambda: self._local_roles(mode, k))
        drafter, mirrored = roles.drafter, None
        if isinstance(drafter, ModelDrafter | TreeDrafter):
            drafter = mirrored = MirroredDrafter(leader, engine, drafter)
        target = MirroredTarget(leader, engine, roles.target, mirrored)
        return Roles(target, drafter, target.close)

    def prepare(self, params: SamplingParams) -> None:
        """Loads the programs that only requests with such parameters need.

        The thread that adds the first of them waits; rounds of other requests go on.
        """
        for extra in sorted(params.extras - self._loaded_extras):
            if isinstance(self.hosts, Leader):
                self.hosts.load(extra, partial(self.load_extra, extra))
            else:
                self.load_extra(extra)
            self._loaded_extras.add(extra)

    def load_extra(self, extra: Extra) -> None:
        """Loads the programs of an extra in this process."""
        with self._load_lock:
            self.resolved.placement.use_store(self.store)
            if extra == "grammar":
                masked_programs.load(self.programs)
            else:
                logprob_programs.load(self.programs, extra)

    def program_bytes(self, engines: Collection[tuple[str, int]]) -> dict[str, int]:
        """Most bytes that the programs of each role take on a device while they run.

        The draft's are included if one of `engines`, as (mode, K), has it in this process; they are
        compiled if need be.
        """
        by_role, modes = {"target": self.programs.working_memory}, {mode for mode, _ in engines}
        menus: list[Sequence[PagedPrograms] | BranchingMenu] = []
        if self.inline is not None and "sd" in modes:
            menus.append([self.inline.plain()])
        if self.inline is not None and "ssd" in modes and self.worker is None:
            menus.append(self.inline.branching())
        if menus:
            by_role["draft"] = max(programs.working_memory for menu in menus for programs in menu)
        return by_role

    def close(self) -> None:
        """Ends the worker, if there is one, and drafts that are objects."""
        if self.worker is not None:
            self.worker.close()
        for draft in self._custom_drafts:
            draft.close()
        self._custom_drafts.clear()
