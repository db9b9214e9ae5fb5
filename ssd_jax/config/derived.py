"""Values that follow from an engine's settings."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal, cast

from ssd_jax.config.batch_sizes import parse as parse_sizes
from ssd_jax.config.kv_memory import bytes_of, share_of
from ssd_jax.config.objects import is_object
from ssd_jax.config.settings import (
    AUTO_BUDGETS,
    AUTO_K,
    AUTO_NODES,
    BUDGET,
    MODEL_K,
    EngineSettings,
)
from ssd_jax.config.values import kind_of
from ssd_jax.placement.device_groups import DeviceGroups, Grid
from ssd_jax.placement.parallel.layout import Layout, Split, choose
from ssd_jax.placement.placement import Kind
from ssd_jax.roles.drafting import TreeShape
from ssd_jax.sampling.rules import RULES
from ssd_jax.speculation.backup import BackupKind
from ssd_jax.speculation.fan_out import FanOut
from ssd_jax.speculation.fan_out_flag import parse
from ssd_jax.speculation.text_drafts import TEXT_DRAFTS
from ssd_jax.system.cache_dir import StoreSettings
from ssd_jax.system.cores import Cores
from ssd_jax.wire.address import Address
from ssd_jax.wire.security import Files


class DerivedSettings(EngineSettings):
    """The settings of an engine, and what follows from them alone."""

    @property
    def draft_model(self) -> str | None:
        """Source of the draft model, if the draft is one."""
        return None if self.draft in TEXT_DRAFTS or is_object(self.draft) else self.draft

    @property
    def speculated(self) -> int:
        """K, or the most with k = auto; 0 without a draft."""
        if self.draft is None:
            return 0
        if self.chooses_k:
            return AUTO_K
        if self.k is not None:
            return int(self.k)
        return TEXT_DRAFTS[self.draft].k if self.draft in TEXT_DRAFTS else MODEL_K

    @property
    def prepared(self) -> str:
        """The mode that is prepared for: with mode auto, the one that needs most."""
        if self.mode != "auto":
            return self.mode
        return "ssd" if self.draft_model else "sd"

    @property
    def chooses_k(self) -> bool:
        """Whether K is chosen while decoding."""
        return self.k == "auto" or (self.mode == "auto" and self.k is None)

    @property
    def chooses_tree(self) -> bool:
        """Whether the chain or a tree is chosen at the start."""
        return self.tree_nodes == "auto"

    @property
    def trees(self) -> tuple[int, ...]:
        """Numbers of nodes of the trees that may be proposed, ascending; none with chains alone."""
        if self.chooses_tree:
            return tuple(nodes for nodes in AUTO_NODES if nodes > self.speculated)
        return (int(self.tree_nodes),) if self.tree_nodes else ()

    def budgets_at(self, kind: Kind | None = None) -> tuple[int, ...]:
        """All M that are prepared for, ascending; none without branches.

        Args:
          kind: where the draft runs. Of one in processes, on whose processor every branch costs,
            the number is chosen.
        """
        if self.prepared != "ssd":
            return ()
        is_list = self.fan_out is not None and "," in self.fan_out
        is_fixed = is_list or bool(self.tree_nodes)
        is_auto = self.mode == "auto" or (kind in ("process", "remote") and not is_fixed)
        budget = self.budget or ("auto" if is_auto else BUDGET)
        if budget == "auto":
            extra = (2 * AUTO_BUDGETS[-1],) if self.workers > 1 else ()
            return AUTO_BUDGETS + extra
        return (int(budget),)

    @property
    def backup_kind(self) -> BackupKind:
        """What a miss of mode ssd proposes."""
        return cast("BackupKind", self.backup or "auto")

    def fan_out_of(self, k: int, branches: int) -> FanOut:
        """A new fan-out policy for K = k and up to so many branches.

        Raises:
          InputError: a list that does not fit.
        """
        return parse("geometric" if self.fan_out is None else self.fan_out, k, branches)

    @property
    def cores(self) -> Cores:
        """Processor cores that the user gave."""
        return Cores.parse(self.target_cores, self.draft_cores)

    @property
    def device_groups(self) -> DeviceGroups:
        """Devices that the user gave."""
        return DeviceGroups.parse(self.target_devices, self.draft_devices)

    @property
    def kv_share(self) -> Fraction | None:
        """The share of a memory that is filled by keys and values beside all else; None where
        `kv_memory` is a size or not given."""
        return share_of(self.kv_memory)

    @property
    def kv_bytes(self) -> int:
        """`kv_memory` in bytes; 0 where it is not given."""
        return bytes_of(self.kv_memory)

    @property
    def grid(self) -> Grid | None:
        """The grid of the target's devices."""
        return None if self.mesh is None else Grid.parse(self.mesh)

    @property
    def smaller_batches(self) -> tuple[int, ...]:
        """Batch sizes below that of all slots, of each group of the target's devices.

        Raises:
          InputError: sizes that are not possible.
        """
        if self.hosts is not None and self.batch_sizes == "auto":
            return ()  # each process would change sizes at its own time
        return parse_sizes(self.batch_sizes, self.slots // (self.grid.data if self.grid else 1))

    @property
    def placement_kind(self) -> Kind | Literal["auto"]:
        """The placement as given, or the default; without ssd there is nothing to place."""
        is_placed = self.prepared == "ssd" and not is_object(self.draft)
        placement = self.draft_placement or ("auto" if is_placed else "inline")
        placement = "process" if self.hosts is not None and placement == "auto" else placement
        return cast("Kind | Literal['auto']", kind_of(placement))

    @property
    def draft_addresses(self) -> tuple[Address, ...]:
        """Addresses of remote workers."""
        if self.placement_kind != "remote":
            return ()
        addresses = (self.draft_placement or "").partition(":")[2]
        return tuple(
            Address.parse(address, "draft_placement: remote") for address in addresses.split(",")
        )

    @property
    def workers(self) -> int:
        """Number of workers of a draft."""
        return len(self.draft_addresses) or self.draft_workers or 1

    @property
    def layout(self) -> Layout:
        """How workers in processes share the work."""
        split, k = cast("Split", self.draft_split or "auto"), self.speculated
        branches, width = max(self.budgets_at(), default=0), 1
        if self.trees and self.prepared == "ssd":
            width = TreeShape(nodes=max(self.trees), depth=k, ancestors=k).width
        return choose(self.workers, split, slots=self.slots, branches=branches, k=k, width=width)

    @property
    def store(self) -> StoreSettings:
        """Where compiled programs are stored."""
        return StoreSettings(self.compile_cache, self.compile_cache_secret)

    @property
    def draft_files(self) -> Files:
        """Secrets and certificates of a remote worker."""
        return Files(
            self.draft_token_file, self.draft_tls_ca, self.draft_tls_cert, self.draft_tls_key
        )

    def counts_ranks(self, temperature: float) -> bool:
        """Whether trees for requests of a temperature are shaped by counted ranks of tokens."""
        return temperature == 0 or RULES[self.verify].keyed_by_position
