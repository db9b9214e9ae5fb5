"""Settings of an engine, checked together, and values derived from them."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, Unpack, cast

from ssd_jax.checkpoints.native import check_source
from ssd_jax.config.keywords import ConfigSettings
from ssd_jax.config.kv_memory import bytes_of, share_of
from ssd_jax.config.objects import is_object
from ssd_jax.config.settings import (
    AUTO_BUDGETS,
    AUTO_K,
    AUTO_NODES,
    BUDGET,
    MEANINGLESS,
    MODEL_K,
    OF_MODELS,
    EngineSettings,
)
from ssd_jax.config.values import kind_of
from ssd_jax.config.vllm_names import NAMES
from ssd_jax.errors import InputError
from ssd_jax.options.fields import immutable, with_field_help
from ssd_jax.options.other_names import accept_names
from ssd_jax.placement.device_groups import DeviceGroups, Grid
from ssd_jax.placement.hosts.flag import Hosts
from ssd_jax.placement.parallel.layout import Layout, Split, choose
from ssd_jax.placement.placement import Kind, Placement, place
from ssd_jax.roles.drafting import MAX_BRANCHING_DEPTH, RANKS
from ssd_jax.sampling.rules import RULES
from ssd_jax.speculation.backup import BackupKind
from ssd_jax.speculation.fan_out import FanOut
from ssd_jax.speculation.fan_out_flag import parse
from ssd_jax.speculation.text_drafts import TEXT_DRAFTS
from ssd_jax.system.cache_dir import StoreSettings
from ssd_jax.system.cores import Cores
from ssd_jax.wire.address import Address
from ssd_jax.wire.security import ENGINE_SETTINGS, Files

_READ_Q = "verify = " + " or ".join(repr(name) for name, rule in RULES.items() if rule.ships_q)


@accept_names(NAMES)
@immutable
@with_field_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(EngineSettings):
    """Which model runs, how, and with what room.

    Raises:
      InputError: a value that is unknown, out of range, or in conflict with another.
    """

    if TYPE_CHECKING:

        def __init__(self, **_settings: Unpack[ConfigSettings]) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix_caching and self.kv_memory is None and self.page_size is None:
            raise InputError("prefix_caching needs pages that slots share; give kv_memory")
        if self.kv_share is None:
            self.kv_bytes  # noqa: B018 (checks)
        self._check_draft()
        check_source(self.target, self.dtype)
        check_source(self.draft_model, self.draft_dtype)
        self._check_objects()
        self._check_placement()
        self._check_hosts()
        if self.prepared == "ssd":
            self._check_fan_out()

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

    def place_draft(self) -> Placement:
        """Where both roles run; starts JAX if it has to look at the devices.

        Raises:
          InputError: devices that do not exist.
        """
        placement = place(
            self._draft_placement,
            self.device_groups,
            self.grid,
            self._draft_addresses,
            workers=self.workers,
            hosts=self.hosts is not None,
        )
        if self.workers > 1:
            placement = dataclasses.replace(placement, layout=self._layout_of(placement))
        if self.cores.draft is not None and placement.kind != "process":
            raise InputError(
                f"draft_cores = {self.draft_cores!r} is for a draft in a process, and here "
                f"{placement}; leave it out, or use draft_placement = 'process'"
            )
        return placement

    @property
    def _draft_placement(self) -> Kind | Literal["auto"]:
        """The placement as given, or the default; without ssd there is nothing to place."""
        is_placed = self.prepared == "ssd" and not is_object(self.draft)
        placement = self.draft_placement or ("auto" if is_placed else "inline")
        placement = "process" if self.hosts is not None and placement == "auto" else placement
        return cast("Kind | Literal['auto']", kind_of(placement))

    @property
    def _draft_addresses(self) -> tuple[Address, ...]:
        """Addresses of remote workers."""
        if self._draft_placement != "remote":
            return ()
        addresses = (self.draft_placement or "").partition(":")[2]
        return tuple(
            Address.parse(address, "draft_placement: remote") for address in addresses.split(",")
        )

    @property
    def workers(self) -> int:
        """Number of workers of a draft."""
        return len(self._draft_addresses) or self.draft_workers or 1

    def _layout_of(self, placement: Placement) -> Layout:
        """How several workers share the work there; devices of one process only share slots."""
        setting = f"draft_workers = {self.workers}"
        if placement.out_of_process:
            return self.layout
        if placement.kind == "inline":
            raise InputError(
                f"{setting} is for a draft elsewhere, and this is {placement}; leave it out, or "
                "use draft_placement = 'process'"
            )
        if self.draft_split == "branches":
            raise InputError(
                f"draft_split = 'branches' is for a draft in processes, and this is {placement}; "
                "leave it out, or use draft_placement = 'process'"
            )
        if self.slots % self.workers:
            raise InputError(
                f"slots = {self.slots} cannot be shared evenly by {setting} in a submesh; give a "
                "multiple"
            )
        data = 1 if self.grid is None else self.grid.data
        if (self.kv_memory or self.page_size) and data != self.workers:
            raise InputError(
                f"{setting} in a submesh have pages for their own slots, and so must the target's "
                f"groups be as many where slots share pages: give mesh = 'data={self.workers}', "
                "or leave kv_memory and page_size out"
            )
        return Layout(self.workers, 1)

    @property
    def layout(self) -> Layout:
        """How workers in processes share the work."""
        split = "slots" if self.tree_nodes else cast("Split", self.draft_split or "auto")
        branches = max(self.budgets_at(), default=0)
        return choose(self.workers, split, slots=self.slots, branches=branches, k=self.speculated)

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

    def _check_draft(self) -> None:
        """Refuses settings that exclude each other."""
        remedies = {
            "ssd": "needs a draft model: `draft='default'` (the one that comes with the package), "
            "or a model source; `draft='ngram'` is for `mode='sd'`",
            "sd": "needs a draft: `draft='ngram'`, `draft='default'` (the one that comes with the "
            "package), or a model source",
            "auto": "finds out whether a draft pays; give one, `draft='ngram'`, `draft='default'` "
            "(the one that comes with the package) or a model source, or use `mode='ar'`",
        }
        model_or_object = self.draft_model or is_object(self.draft)
        draft = model_or_object if self.mode == "ssd" else self.draft
        if self.mode in remedies and not draft:
            raise InputError(f"mode = {self.mode!r} {remedies[self.mode]}")
        for (setting, value), names in MEANINGLESS.items():
            for name in names if getattr(self, setting) == value else ():
                if getattr(self, name) is not None:
                    raise InputError(
                        f"{name} = {getattr(self, name)!r} means nothing with {setting} = "
                        f"{value!r}; leave out one"
                    )
        if self.tree_nodes:
            self._check_tree()
        if not RULES[self.verify].ships_q and self.proposal_support == "full":
            raise InputError(
                f"proposal_support = 'full' is for {_READ_Q}; {self.verify} proposals ship no q"
            )
        if not RULES[self.verify].ships_q and self.saguaro_c not in (None, 1):
            raise InputError(
                f"saguaro_c = {self.saguaro_c} is for {_READ_Q}; {self.verify} proposals have no "
                "residual to move"
            )

    def _check_tree(self) -> None:
        """Refuses a tree where there is none, or that is no tree."""
        tree = f"tree_nodes = {self.tree_nodes!r}"
        if self.mode not in ("sd", "ssd"):
            raise InputError(
                f"{tree} is for mode = 'sd' and 'ssd', and this is {self.mode!r}; leave it out, or "
                "change the mode"
            )
        if self.chooses_k:
            raise InputError(
                f"{tree} needs a number for k, the longest path, and here it is chosen while "
                "decoding; give k, such as 4"
            )
        if self.chooses_tree and self.hosts is not None:
            raise InputError(
                f"{tree} is measured at the start, and with hosts = {self.hosts!r} other processes "
                "would have to follow; give a number"
            )
        if max(self.trees) <= self.speculated:
            raise InputError(
                f"{tree} leaves no node beside a chain of k = {self.speculated}; give more nodes, "
                "or lower k"
            )
        if self.speculated == 1 and max(self.trees) > RANKS:
            raise InputError(
                f"{tree} is more than the {RANKS} nodes that a tree of paths of k = 1 may have; "
                "give no more, or raise k"
            )
        if self.mode == "ssd":
            self._check_branching_tree()

    def _check_branching_tree(self) -> None:
        """Refuses what trees do not have in mode ssd."""
        tree = f"tree_nodes = {self.tree_nodes!r} in mode = 'ssd'"
        if self.chooses_tree:
            raise InputError(f"{tree} is for mode = 'sd'; give a number of nodes")
        if not RULES[self.verify].keyed_by_position:
            raise InputError(
                f"{tree} needs verify = 'coupled', and this is {self.verify!r}; give it, or leave "
                "tree_nodes out"
            )
        if self.speculated > MAX_BRANCHING_DEPTH:
            raise InputError(
                f"{tree} has paths of up to k = {MAX_BRANCHING_DEPTH} tokens, and k is "
                f"{self.speculated}; lower it"
            )
        chains: dict[str, object] = {
            "fan_out": self.fan_out,
            "predict": self.predict,
            "backup": self.backup if self.backup == "draft" else None,
            "budget": self.budget if self.budget == "auto" else None,
            "draft_split": self.draft_split if self.draft_split == "branches" else None,
        }
        for name, value in chains.items():
            if value is not None:
                raise InputError(
                    f"{name} = {value!r} is for chains, and {tree} has none; leave out one"
                )

    def check_tree_sampling(self, temperature: float) -> None:
        """Refuses trees where requests are sampled by default, by a rule that has none for them.

        Args:
          temperature: of requests that come without one.

        Raises:
          InputError: they would all have chains.
        """
        if self.chooses_tree or not self.tree_nodes or temperature == 0:
            return
        if not RULES[self.verify].judges_trees:
            raise InputError(
                f"tree_nodes = {self.tree_nodes} with verify = {self.verify!r} is for greedy "
                f"requests, and the default temperature is {temperature}; give another rule, or "
                "leave tree_nodes out"
            )

    def counts_ranks(self, temperature: float) -> bool:
        """Whether trees for requests of a temperature are shaped by counted ranks of tokens."""
        return temperature == 0 or RULES[self.verify].keyed_by_position

    def _check_objects(self) -> None:
        """Refuses what an object of the program has no part in."""
        for name in ("draft", "fan_out"):
            if is_object(getattr(self, name)) and self.hosts is not None:
                raise InputError(
                    f"hosts = {self.hosts!r}: other processes do not have the object {name} = "
                    f"{getattr(self, name)!r}; leave out one"
                )
        if not is_object(self.draft):
            return
        for name in OF_MODELS:
            if getattr(self, name) is not None:
                raise InputError(
                    f"{name} = {getattr(self, name)!r} is for a draft model, and draft = "
                    f"{self.draft!r} is an object of this process; leave it out"
                )
        for name, remedy in (("mode", "sd or ssd"), ("k", "a number"), ("budget", "a number")):
            if getattr(self, name) == "auto":
                raise InputError(
                    f"{name} = 'auto' is chosen by measured costs, and those of an object, draft = "
                    f"{self.draft!r}, are not measured; give {remedy}"
                )

    def _check_placement(self) -> None:
        """Refuses cores, devices and files that mean nothing where the draft runs."""
        addresses = self._draft_addresses
        for address in addresses:
            self.draft_files.check(address, serves=False)
        if addresses and self.draft_workers not in (None, len(addresses)):
            raise InputError(
                f"draft_workers = {self.draft_workers}, and draft_placement = "
                f"{self.draft_placement!r} names {len(addresses)}; leave draft_workers out"
            )
        if self.draft_split not in (None, "auto") and self.workers == 1:
            raise InputError(
                f"draft_split = {self.draft_split!r} is for several workers; give draft_workers, "
                "or the addresses of several"
            )
        if not addresses and any(self.draft_files):
            name = next(
                n for n, path in zip(ENGINE_SETTINGS, self.draft_files, strict=True) if path
            )
            raise InputError(f"{name} is for draft_placement = 'remote:HOST:PORT'; leave it out")
        if self.cores.draft is not None and self._draft_placement not in ("process", "auto"):
            raise InputError(
                f"draft_cores = {self.draft_cores!r} is for draft_placement = 'process'; elsewhere "
                "the draft shares the target's process"
            )
        self.device_groups  # noqa: B018 (checks)
        if self.draft_devices is not None and self._draft_placement in ("inline", "remote"):
            raise InputError(
                f"draft_devices = {self.draft_devices!r} is for a draft elsewhere on this host, "
                f"and this is draft_placement = {self.draft_placement!r}; change that, or leave "
                "the devices out"
            )
        if self.grid is not None and self.slots % self.grid.data:
            raise InputError(
                f"slots = {self.slots} cannot be shared evenly by the {self.grid.data} groups of "
                f"mesh = {self.mesh!r}; give a multiple"
            )

    def _check_hosts(self) -> None:
        if self.hosts is None:
            return
        Hosts.parse(self.hosts)
        if self.draft_devices is not None:
            raise InputError(
                f"draft_devices = {self.draft_devices!r}: with hosts a draft in a process is on "
                "the leader's processor; leave it out, or use draft_placement = remote:HOST:PORT"
            )
        if self.prepared == "ssd" and self._draft_placement not in ("process", "remote"):
            raise InputError(
                f"draft_placement = {self.draft_placement!r} is for the devices of one process; "
                "with hosts the draft of mode ssd is in one beside the leader, or on another host: "
                "use process or remote:HOST:PORT"
            )

    def _check_fan_out(self) -> None:
        budgets = self.budgets_at()
        names = ["k"] * self.chooses_k + ["budget"] * (len(budgets) > 1)
        if names and self.fan_out is not None and "," in self.fan_out:
            raise InputError(
                f"fan_out = {self.fan_out!r} lists branches for one k and budget, and "
                f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} chosen while "
                "decoding; give numbers for them, or a policy such as measured"
            )
        if not is_object(self.fan_out):
            self.fan_out_of(self.speculated, max(budgets))
