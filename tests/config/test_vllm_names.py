"""Names of vLLM and transformers for settings: taken as ours, translated, or refused in a line."""

from __future__ import annotations

import typing

import pytest

from ssd_jax import Config, InputError
from ssd_jax.cli import settings
from ssd_jax.config.keywords import Speculative, VllmSettings
from ssd_jax.config.vllm_names import _SPECULATIVE, NAMES, SAME_AS, TRANSLATED, refusal
from ssd_jax.options.other_names import SameAs, Unsupported, canonical_settings

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
MODEL = {"model": "m", "num_speculative_tokens": 3}
SD = {"mode": "sd", "draft": "m", "k": 3}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"model": "m"}, {"target": "m"}),
        ({"block_size": 32}, {"page_size": 32}),
        ({"kv_cache_memory_bytes": 1 << 30}, {"kv_memory": 1 << 30}),
        ({"max_logprobs": 3}, {}),
        ({"tensor_parallel_size": 4}, {"mesh": "tensor=4"}),
        ({"tensor_parallel_size": 1}, {}),
        ({"tensor_parallel_size": 1, "target_devices": 0}, {"mesh": "tensor=1"}),
        (
            {"tensor_parallel_size": 1, "speculative_config": MODEL, "mode": "ssd"},
            {**SD, "mode": "ssd", "mesh": "tensor=1"},
        ),
        ({"gpu_memory_utilization": 0.9}, {"kv_memory": "0.9"}),
        ({"quantization": None}, {}),
        ({"quantization": "gguf"}, {"dtype": "native"}),
        ({"quantization": "gguf", "dtype": "auto"}, {"dtype": "auto"}),
        ({"logprobs_mode": "raw_logprobs"}, {}),
        ({"logprobs_mode": "processed_logprobs"}, {"logprobs_of": "processed"}),
        ({"speculative_config": None}, {}),
        ({"speculative_config": NGRAM}, {"mode": "sd", "draft": "ngram", "k": 5}),
        ({"speculative_config": '{"method": "ngram"}'}, {"mode": "sd", "draft": "ngram"}),
        ({"speculative_config": {"model": "[ngram]"}}, {"mode": "sd", "draft": "ngram"}),
        ({"speculative_config": MODEL}, SD),
        ({"speculative_config": {**MODEL, "method": "draft_model"}}, SD),
        ({"speculative_config": MODEL, "mode": "ssd"}, {**SD, "mode": "ssd"}),
        ({"speculative_config": MODEL, "mode": "auto"}, {**SD, "mode": "auto"}),
        (
            {"speculative_config": {**MODEL, "quantization": "gguf"}},
            {**SD, "draft_dtype": "native"},
        ),
        ({"speculative_config": {**MODEL, "draft_tensor_parallel_size": 1}}, SD),
        ({"speculative_config": {**MODEL, "rejection_sample_method": None}}, SD),
        ({"speculative_config": {**MODEL, "rejection_sample_method": "standard"}}, SD),
        (
            {"speculative_config": {**MODEL, "rejection_sample_method": "block"}},
            {**SD, "verify": "block"},
        ),
        ({"speculative_config": {"num_speculative_tokens": 3}, "draft": "m"}, SD),
        ({"speculative_model": "m", "num_speculative_tokens": 3}, SD),
    ],
)
def test_a_setting_of_vllm_means_ours(given, meant):
    unnamed = {name: given[name] for name in given if name not in NAMES}
    assert Config(**given) == Config(**{**unnamed, **meant})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "a", "target": "b"}, "model and target are two names of one setting"),
        (
            {"tensor_parallel_size": 2, "mesh": "data=2"},
            "tensor_parallel_size and mesh say the sam",
        ),
        ({"tensor_parallel_size": 1, "mesh": "data=2"}, "tensor_parallel_size and mesh say the"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size = 0 is impossible; give a number of d"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size = True is impossible"),
        ({"gpu_memory_utilization": 1.5}, "kv_memory = '1.5' is not understood; .* such as 90%"),
        ({"gpu_memory_utilization": 0.5, "kv_memory": "1GiB"}, "and kv_memory say the same thing"),
        (
            {"quantization": "awq"},
            r"quantization = 'awq' is not supported; `dtype='int8'` .*leave it out",
        ),
        ({"quantization": "gguf", "dtype": "int8"}, "quantization and dtype say the same thing"),
        ({"seed": 1}, r"seed = 1 means nothing here: .*`SamplingParams\(seed=...\)`"),
        ({"trust_remote_code": True}, "trust_remote_code = True means nothing here: no code of"),
        ({"max_num_batched_tokens": 2048}, "prompts are read in chunks of a fixed size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2 means nothing here: `mesh`"),
        ({"speculative_config": {"method": "eagle", "model": "m"}}, "'eagle' .*: give ngram, or"),
        ({"speculative_config": {**NGRAM, "prompt_lookup_max": 4}}, "prompt_lookup_max = 4 means"),
        ({"speculative_config": {**NGRAM, "model": "m"}}, "method = 'ngram' has no model"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "which draft.*'default'.*ngram"),
        (
            {"speculative_config": {**MODEL, "rejection_sample_method": "synthetic"}},
            "rejection_sample_method = 'synthetic' is not supported; give standard or block",
        ),
        (
            {
                "speculative_config": {**MODEL, "rejection_sample_method": "block"},
                "verify": "coupled",
            },
            "speculative_config and verify say the same thing",
        ),
        ({"speculative_config": {"modle": "m"}}, "speculative_config: unknown key 'modle'; did yo"),
        (
            {"speculative_config": "ngram"},
            "speculative_config = 'ngram' is not understood; give an",
        ),
        ({"speculative_config": MODEL, "k": 3}, "speculative_config and k say the same thing"),
        ({"speculative_config": MODEL, "mode": "ar"}, "draft = 'm' means nothing with mode = 'ar'"),
        (
            {"speculative_config": {**MODEL, "draft_tensor_parallel_size": 1}, "mesh": "tensor=2"},
            "draft_tensor_parallel_size = 1 means nothing here; `draft_devices`",
        ),
        ({"tensor_paralel_size": 2}, "unknown key .* did you mean 'tensor_parallel_size'"),
    ],
)
def test_settings_of_vllm_without_meaning_are_refused_with_the_remedy(given, message):
    with pytest.raises(InputError, match=message):
        Config(**given)


@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(NAMES[name], Unsupported)])
def test_a_name_without_a_setting_is_taken_where_it_asks_for_nothing(name):
    known = NAMES[name]
    for value in known.accepted:
        assert Config(**{name: value}) == Config()
    with pytest.raises(InputError, match=f"^{name} = 'x' means nothing here: ") as error:
        Config(**{name: "x"})
    assert known.remedy in str(error.value)
    assert known.remedy in refusal(name)


def test_every_name_leads_to_settings_that_exist():
    fields = set(Config.__dataclass_fields__)
    assert {*SAME_AS.values()} <= fields
    assert not fields & {*NAMES}
    kinds = VllmSettings.__annotations__
    assert set(kinds) == {*SAME_AS, *TRANSLATED}
    inner = {name for name, known in _SPECULATIVE.items() if isinstance(known, SameAs)}
    assert inner <= set(typing.get_type_hints(Speculative)) <= set(_SPECULATIVE)


def test_a_known_name_is_translated_and_others_stay():
    assert canonical_settings({"max_num_seqs": 3, "else": 4}, NAMES) == {"slots": 3, "else": 4}


@pytest.fixture
def parsed():
    def run(*arguments):
        values = settings.new_flags()
        return settings.config_of(settings.parse(values, "generate", arguments))

    return run


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        (["--model=m"], ["--target=m"]),
        (["--model", "m", "--max-model-len=99"], ["--target=m", "--context=99"]),
        (["--tensor-parallel-size=4"], ["--mesh=tensor=4"]),
        (["--tensor_parallel_size", "4"], ["--mesh=tensor=4"]),
        (["--gpu-memory-utilization=0.5"], ["--kv_memory=0.5"]),
        (["--quantization=gguf"], ["--dtype=native"]),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}'],
            ["--mode=sd", "--draft=ngram", "--k=5"],
        ),
        (
            ["--mode=ssd", '--speculative_config={"model": "m"}'],
            ["--mode=ssd", "--draft=m"],
        ),
    ],
)
def test_flags_of_vllm_mean_ours(parsed, arguments, same):
    assert parsed(*arguments) == parsed(*same)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor-parallel-size=4", "--mesh=data=2"], "tensor_parallel_size and mesh say the sa"),
        (["--enforce-eager"], "there is no flag --enforce-eager: programs are always compiled"),
        (["--max_num_batched_tokens=9"], "there is no flag .*: prompts are read in chunks"),
        (["--speculative-config=3"], "speculative_config = 3 is not understood; give an object"),
    ],
)
def test_flags_of_vllm_that_cannot_be_are_refused(parsed, arguments, message):
    with pytest.raises(InputError, match=message):
        parsed(*arguments)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("tensor_parallel_size = 4", ["--mesh=tensor=4"]),
        ("gpu_memory_utilization = 0.5\nmodel = 'm'", ["--kv_memory=0.5", "--target=m"]),
        ("seed = 5", ["--seed=5"]),
    ],
)
def test_a_file_of_settings_may_have_names_of_vllm(parsed, tmp_path, text, same):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    assert parsed(f"--config={path}") == parsed(*same)


def test_a_file_with_settings_of_vllm_without_meaning_is_refused_by_name(parsed, tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("swap_space = 4")
    with pytest.raises(InputError, match=f"config {path}: swap_space = 4 means nothing here"):
        parsed(f"--config={path}")
