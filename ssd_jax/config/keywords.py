"""Settings as keyword arguments, by our names or vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict

from ssd_jax.placement.parallel.layout import Split
from ssd_jax.roles.protocols import DraftFactory
from ssd_jax.sampling.rules import RuleName
from ssd_jax.speculation.backup import BackupKind
from ssd_jax.speculation.fan_out import FanOutFactory

Mode = Literal["ar", "sd", "ssd", "auto"]
Dtype = Literal["float32", "bfloat16", "int8", "native"]
DraftDtype = Literal[Dtype, "w8a8"]
SamplingSource = Literal["none", "auto"]
Prediction = Literal["plain", "noise"]
Exactness = Literal["auto", "distribution", "bitwise"]
ControlTokens = Literal["parse", "plain"]
AttentionKernel = Literal["auto", "cpu", "pallas_tpu", "pallas_gpu", "pallas_mma", "xla"]
LogprobsOf = Literal["raw", "processed"]


class Speculative(TypedDict, total=False):
    """vLLM's `speculative_config`, as far as its keys mean something here."""

    model: str | Path | None
    method: Literal["ngram", "draft_model"] | None
    num_speculative_tokens: int
    quantization: Literal["gguf"] | None
    draft_tensor_parallel_size: int | None
    rejection_sample_method: Literal["standard", "block"] | None


class VllmSettings(TypedDict, total=False):
    """Names of vLLM for settings; see `vllm_names`."""

    model: str | Path
    max_num_seqs: int
    max_model_len: int | None
    num_speculative_tokens: int | str | None
    enable_prefix_caching: bool | None
    enable_expert_parallel: bool
    block_size: int | None
    kv_cache_memory_bytes: int | None
    speculative_config: Speculative | None
    speculative_model: str | Path | None
    tensor_parallel_size: int
    gpu_memory_utilization: float
    quantization: Literal["gguf"] | None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]


class Settings(VllmSettings, total=False):
    """Settings of a `Config` besides its target, as keyword arguments.

    Numbers and paths need not be text.
    """

    mode: Mode
    draft: str | Path | DraftFactory | None
    k: int | str | None
    dtype: Literal[Dtype, "auto"]
    draft_dtype: DraftDtype | None
    slots: int
    batch_sizes: int | str
    context: int | None
    kv_memory: int | float | str | None
    page_size: int | None
    prefix_caching: bool | None
    chat_template: bool | None
    control_tokens: ControlTokens
    generation_config: SamplingSource
    draft_temperature: float | None
    proposal_support: int | str | None
    verify: RuleName
    tree_nodes: int | str | None
    budget: int | str | None
    fan_out: str | FanOutFactory | None
    saguaro_c: float | None
    backup: BackupKind | None
    predict: Prediction | None
    draft_placement: str | None
    draft_devices: int | str | None
    target_cores: int | str | None
    draft_cores: int | str | None
    draft_token_file: str | Path | None
    draft_workers: int | None
    draft_split: Split | None
    draft_tls_ca: str | Path | None
    draft_tls_cert: str | Path | None
    draft_tls_key: str | Path | None
    target_devices: int | str | None
    mesh: str | None
    expert_parallel: bool
    hosts: str | None
    host_timeout: float
    exact: Exactness
    attention: AttentionKernel
    logprobs_of: LogprobsOf
    trace: str | Path | None
    compile_cache: str | Path
    compile_cache_secret: str | Path | None


class ConfigSettings(Settings, total=False):
    """Every setting of a `Config`."""

    target: str | Path
