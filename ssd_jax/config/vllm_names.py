"""Names that vLLM and transformers give to settings of an engine, and what stands for them here.

One declaration a name: another name of a setting, a value that is translated into settings, or a
name that has no setting here, with the values that ask for nothing else and what to do instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.options.fields import check_names, wrong_value
from ssd_jax.options.other_names import (
    Names,
    SameAs,
    Settings,
    Translated,
    Unsupported,
    aliases_of,
    canonical_settings,
)
from ssd_jax.sampling.params import MAX_LOGPROBS
from ssd_jax.sampling.rules import RULES

_OFF, _ON = (None, False), (None, True)
_ONE, _ZERO = (None, 1), (None, 0)
_LEAVE_OUT = "leave it out"


def _parse_count(name: str, value: Any) -> int:
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal() and 0 < int(text) < 1e5):
        raise InputError(f"{name} = {value!r} is impossible; give a number of devices")
    return int(text)


def _mesh(value: Any, settings: Settings) -> dict[str, Any]:
    count = _parse_count("tensor_parallel_size", value)
    is_ar_or_sd = settings.get("mode", "ar") in ("ar", "sd")
    if count == 1 and is_ar_or_sd and not settings.keys() & {"mesh", "target_devices", "hosts"}:
        return {}  # a target has one device then, and no mesh is cheaper than a mesh of one
    return {"mesh": f"tensor={count}"}


def _kv_memory(value: Any, settings: Settings) -> dict[str, Any]:
    del settings
    return {"kv_memory": str(value)}


def _quantized(name: str, setting: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if value == "gguf":
        return {setting: "native"}
    raise InputError(
        f"{name} = {value!r} is not supported; `{setting}='int8'` quantises any checkpoint as it "
        f"loads, and a checkpoint that is quantised says so itself: leave it out"
    )


def _dtype(value: Any, settings: Settings) -> dict[str, Any]:
    translated = _quantized("quantization", "dtype", value)
    return {} if translated and settings.get("dtype") in ("auto", "native") else translated


def _logprobs_of(value: Any, settings: Settings) -> dict[str, Any]:
    del settings
    kinds = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
    if value not in kinds:
        raise InputError(f"logprobs_mode = {value!r} is unknown; one of {', '.join(kinds)}")
    return {} if value == "raw_logprobs" else {"logprobs_of": kinds[value]}


def _draft_devices(value: Any, settings: Settings) -> dict[str, Any]:
    """Nothing where the draft has the target's devices anyway, as it has in vLLM by default."""
    placement_settings = settings.keys() & {"draft_placement", "draft_devices", "mesh"}
    is_shared = settings.get("mode", "sd") == "sd" and not placement_settings
    if value is None or (is_shared and value == settings.get("tensor_parallel_size", 1)):
        return {}
    raise InputError(
        f"speculative_config: draft_tensor_parallel_size = {value!r} means nothing here; "
        "`draft_devices` says which devices, and so how many, a draft has in mode ssd, and in mode "
        "sd it has the target's"
    )


def _verify(value: Any, settings: Settings) -> dict[str, Any]:
    del settings
    rules = {"standard": "ratio", "block": "block"}
    if value is not None and value not in rules:
        raise InputError(
            f"speculative_config: rejection_sample_method = {value!r} is not supported; give "
            f"{' or '.join(rules)}, or name the rule by `verify`: {', '.join(RULES)}"
        )
    return {} if value is None else {"verify": rules[value]}


_SPECULATIVE: Names = {
    "model": SameAs("draft"),
    "num_speculative_tokens": SameAs("k"),
    "method": Unsupported(
        "give ngram, or draft_model with a model", (None, "draft_model", "ngram")
    ),
    "quantization": Translated(
        lambda value, _: _quantized("speculative_config: quantization", "draft_dtype", value)
    ),
    "draft_tensor_parallel_size": Translated(_draft_devices),
    "prompt_lookup_max": Unsupported(
        "ngram continues the longest earlier match, of 1 to 32 tokens; leave it out", (None, 32)
    ),
    "prompt_lookup_min": Unsupported(
        "ngram continues the longest earlier match, of 1 to 32 tokens; leave it out", _ONE
    ),
    "max_model_len": Unsupported("`context` is that of target and draft"),
    "disable_by_batch_size": Unsupported("`mode='auto'` takes the mode that is fastest here"),
    "speculative_token_tree": Unsupported("`budget` and `fan_out` of mode ssd shape its branches"),
    "rejection_sample_method": Translated(_verify),
    "acceptance_method": Unsupported(
        f"`verify` names the rule: {', '.join(RULES)}", (None, "rejection_sampler")
    ),
    "draft_sample_method": Unsupported("`draft_temperature` is that of proposals, 0 is greedy"),
    "revision": Unsupported("write it as model = 'hf:org/name@REVISION'"),
    "code_revision": Unsupported(f"no code of a checkpoint is run; {_LEAVE_OUT}"),
    "enforce_eager": Unsupported(f"programs are always compiled; {_LEAVE_OUT}", _OFF),
    "disable_padded_drafter_batch": Unsupported(_LEAVE_OUT, _OFF),
    "parallel_drafting": Unsupported("a draft proposes one token after the other", _OFF),
}
"""Keys of `speculative_config`."""


def _speculation(value: Any, settings: Settings) -> dict[str, Any]:
    """Settings of speculative decoding; the mode is sd unless another is given."""
    config = _read_object(value)
    if config is None:
        return {}
    check_names(config, _SPECULATIVE.keys(), "speculative_config: ")
    translated = canonical_settings(config, _SPECULATIVE, "speculative_config: ", context=settings)
    if config.get("method") == "ngram" or translated.get("draft") == "[ngram]":
        if translated.get("draft") not in (None, "ngram", "[ngram]"):
            raise InputError("speculative_config: method = 'ngram' has no model; leave out one")
        translated["draft"] = "ngram"
    if translated.get("draft") is None and "draft" not in settings:
        raise InputError(
            "speculative_config: which draft? give its model, such as 'default' (the smallest that "
            "comes with the package for the target), or method = 'ngram'"
        )
    return ({} if "mode" in settings else {"mode": "sd"}) | {
        name: setting for name, setting in translated.items() if setting is not None
    }


def _speculative_model(value: Any, settings: Settings) -> dict[str, Any]:
    """The draft as vLLM's earlier versions took it."""
    return _speculation(None if value is None else {"model": value}, settings)


def _read_object(value: Any) -> dict[str, Any] | None:
    """A mapping, also as JSON; None where there is none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = str(value)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        example = '{"model": "default", "num_speculative_tokens": 4}'
        raise wrong_value("speculative_config", value, f"an object such as {example}")
    return dict(value)


NAMES: Names = {
    "model": SameAs("target"),
    "enable_expert_parallel": SameAs("expert_parallel"),
    "max_num_seqs": SameAs("slots"),
    "max_model_len": SameAs("context"),
    "num_speculative_tokens": SameAs("k"),
    "enable_prefix_caching": SameAs("prefix_caching"),
    "block_size": SameAs("page_size"),
    "kv_cache_memory_bytes": SameAs("kv_memory"),
    "speculative_config": Translated(_speculation),
    "speculative_model": Translated(_speculative_model),
    "tensor_parallel_size": Translated(_mesh),
    "gpu_memory_utilization": Translated(_kv_memory),
    "quantization": Translated(_dtype),
    "logprobs_mode": Translated(_logprobs_of),
    # Which model.
    "revision": Unsupported("write it as target = 'hf:org/name@REVISION'"),
    "code_revision": Unsupported(f"no code of a checkpoint is run; {_LEAVE_OUT}"),
    "trust_remote_code": Unsupported(f"no code of a checkpoint is run; {_LEAVE_OUT}", _OFF),
    "tokenizer": Unsupported(f"a checkpoint's own tokenizer is taken; {_LEAVE_OUT}"),
    "tokenizer_mode": Unsupported(
        f"a checkpoint's own tokenizer is taken; {_LEAVE_OUT}", (None, "auto")
    ),
    "tokenizer_revision": Unsupported("write it as target = 'hf:org/name@REVISION'"),
    "skip_tokenizer_init": Unsupported(f"requests end at the tokenizer's EOS; {_LEAVE_OUT}", _OFF),
    "hf_token": Unsupported("set HF_TOKEN"),
    "hf_config_path": Unsupported("change the config.json of a copy of the checkpoint"),
    "hf_overrides": Unsupported("change the config.json of a copy of the checkpoint", (None, {})),
    "rope_scaling": Unsupported("change the config.json of a copy of the checkpoint", (None, {})),
    "rope_theta": Unsupported("change the config.json of a copy of the checkpoint"),
    "download_dir": Unsupported("set HF_HOME for hf: sources, XDG_CACHE_HOME for all else"),
    "load_format": Unsupported(f"the format is seen from the files; {_LEAVE_OUT}", (None, "auto")),
    "runner": Unsupported(f"models generate text; {_LEAVE_OUT}", (None, "auto", "generate")),
    "task": Unsupported(f"models generate text; {_LEAVE_OUT}", (None, "auto", "generate")),
    "enable_lora": Unsupported("merge the adapter into a copy of the checkpoint", _OFF),
    "max_loras": Unsupported("merge the adapter into a copy of the checkpoint"),
    "max_lora_rank": Unsupported("merge the adapter into a copy of the checkpoint"),
    "served_model_name": Unsupported(f"nothing is served; {_LEAVE_OUT}"),
    "limit_mm_per_prompt": Unsupported(f"prompts are text; {_LEAVE_OUT}", (None, {})),
    "mm_processor_kwargs": Unsupported(f"prompts are text; {_LEAVE_OUT}", (None, {})),
    # How it runs.
    "seed": Unsupported(
        "each request has its seed, `SamplingParams(seed=...)`, which is 0 where none is given",
        (0,),
    ),
    "enforce_eager": Unsupported(f"programs are always compiled; {_LEAVE_OUT}", _OFF),
    "compilation_config": Unsupported(
        f"programs are always compiled, and kept by `compile_cache`; {_LEAVE_OUT}", (None, {})
    ),
    "max_seq_len_to_capture": Unsupported(f"every length runs compiled programs; {_LEAVE_OUT}"),
    "max_num_batched_tokens": Unsupported(
        f"prompts are read in chunks of a fixed size between rounds; {_LEAVE_OUT}"
    ),
    "enable_chunked_prefill": Unsupported(f"prompts are always read in chunks; {_LEAVE_OUT}", _ON),
    "async_scheduling": Unsupported(_LEAVE_OUT, _OFF),
    "attention_backend": Unsupported("`attention` names the kernel"),
    "attn_implementation": Unsupported("`attention` names the kernel"),
    "pipeline_parallel_size": Unsupported("`mesh` shares layers out by tensor parallelism", _ONE),
    "data_parallel_size": Unsupported("write groups of devices as `mesh='data=2,tensor=4'`", _ONE),
    "distributed_executor_backend": Unsupported("`hosts` makes several processes run one target"),
    "device": Unsupported("set JAX_PLATFORMS to cpu, cuda or tpu", (None, "auto")),
    "device_map": Unsupported(
        "`mesh` and `target_devices` say where the target runs", (None, "auto")
    ),
    "disable_custom_all_reduce": Unsupported(f"XLA reduces between devices; {_LEAVE_OUT}", _OFF),
    "override_generation_config": Unsupported("give `SamplingParams` to `generate`", (None, {})),
    "structured_outputs_config": Unsupported(f"there is no guided decoding; {_LEAVE_OUT}"),
    "guided_decoding_backend": Unsupported(
        f"there is no guided decoding; {_LEAVE_OUT}", (None, "auto")
    ),
    "logprobs": Unsupported("give it to `SamplingParams`"),
    "max_logprobs": Unsupported(
        f"any request may ask for up to {MAX_LOGPROBS}; {_LEAVE_OUT}",
        (None, *range(MAX_LOGPROBS + 1)),
    ),
    "logits_processors": Unsupported("`SamplingParams(logit_bias=...)` changes logits of tokens"),
    # What it stores.
    "torch_dtype": Unsupported("`dtype` is the compute dtype"),
    "load_in_8bit": Unsupported("`dtype='int8'` quantises any checkpoint as it loads", _OFF),
    "load_in_4bit": Unsupported("`dtype='native'` takes a GGUF file as it is quantised", _OFF),
    "kv_cache_dtype": Unsupported(
        "keys and values are bfloat16, and float32 with `dtype='float32'`", (None, "auto")
    ),
    "swap_space": Unsupported(
        "requests that `kv_memory` cannot hold wait, or are computed again", _ZERO
    ),
    "cpu_offload_gb": Unsupported("weights are on the devices; `mesh` shares them out", _ZERO),
    "num_gpu_blocks_override": Unsupported("`kv_memory` is the memory of all pages"),
    # What it says.
    "disable_log_stats": Unsupported("`output.metrics` has the figures of a request", _ON),
    "disable_log_requests": Unsupported(f"requests are not logged; {_LEAVE_OUT}", _ON),
    "enable_log_requests": Unsupported("`trace` records requests", _OFF),
    "show_hidden_metrics_for_version": Unsupported(_LEAVE_OUT),
}
"""Settings by the name that others give them."""

SAME_AS = aliases_of(NAMES)
"""Other names of settings, with ours."""
TRANSLATED = {name: entry for name, entry in NAMES.items() if isinstance(entry, Translated)}


def refusal(name: str) -> str | None:
    """Why a name has no setting here, and what to do; None for other names."""
    entry = NAMES.get(name)
    return f"{name} means nothing here: {entry.remedy}" if isinstance(entry, Unsupported) else None
