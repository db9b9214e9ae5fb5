"""Families: how published configurations are read, and what is refused of others."""

import dataclasses
import json
from pathlib import Path

import pytest

from ssd_jax.errors import InputError
from ssd_jax.models import families
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.families.registry import FAMILIES, MISSING
from ssd_jax.models.mechanisms import PLAIN, Experts, Mechanisms, Multipliers

CONFIGURATIONS = json.loads(
    Path(__file__).with_name("configurations.json").read_text(encoding="utf-8")
)
"""config.json of well-known models, without what nothing here depends on."""
RANKING = json.loads(Path(__file__).with_name("most_downloaded.json").read_text(encoding="utf-8"))
"""The 40 most downloaded models of 2025 and 2026 with their downloads, and those whose sizes were
compared with a public copy; `tests.models_page` says what was counted."""
MOST_DOWNLOADED: dict[str, int] = RANKING["downloads"]
REFUSED = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "needs linear attention",
    "deepseek-ai/DeepSeek-R1": r"needs experts and latent attention \(MLA\)",
    "deepseek-ai/DeepSeek-R1-0528": r"needs experts and latent attention \(MLA\)",
    "deepseek-ai/DeepSeek-V3": r"needs experts and latent attention \(MLA\)",
    "deepseek-ai/DeepSeek-V3.2": r"needs experts and latent attention \(MLA\)",
    "LiquidAI/LFM2-1.2B": "needs linear attention or state spaces",
    "XiaomiMiMo/MiMo-V2-Flash": "needs values of another width than keys",
    "ai21labs/AI21-Jamba-Mini-1.7": "needs linear attention or state spaces",
    "arcee-ai/Trinity-Mini": "needs gates of what attention gives",
    "google/gemma-3n-E4B-it": "needs layers that share keys and values, or with inputs",
    "ibm-granite/granite-4.0-h-tiny": "layer_types = 'mamba' is not supported: it needs linear at",
    "meta-llama/Llama-3.2-11B-Vision-Instruct": "needs attention to images",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "needs attention in chunks",
    "microsoft/Phi-3.5-MoE-instruct": "needs experts that are chosen by sparsemixer",
    "moonshotai/Kimi-K2-Instruct": r"needs experts and latent attention \(MLA\)",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "needs linear attention or state spaces",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": "needs linear attention or state spaces",
    "openbmb/MiniCPM3-4B": r"needs latent attention \(MLA\)",
    "tiiuae/Falcon-H1-7B-Instruct": "needs linear attention or state spaces",
    "zai-org/GLM-4.7-Flash": r"needs experts and latent attention \(MLA\)",
}
TEXT = CONFIGURATIONS["mistralai/Mistral-Small-3.1-24B-Instruct-2503"]["text_config"]
READ = [name for name in CONFIGURATIONS if name not in REFUSED]


def read(name: str, **changes) -> ModelConfig:
    return ModelConfig.from_hf(CONFIGURATIONS[name] | changes)


def test_most_of_the_most_downloaded_models_are_read():
    counts = list(MOST_DOWNLOADED.values())
    assert len(counts) == 40
    assert counts == sorted(counts, reverse=True)
    assert {*RANKING["compared"]} <= {*CONFIGURATIONS}
    assert len([name for name in MOST_DOWNLOADED if name in READ]) >= 33


@pytest.mark.parametrize("name", READ)
def test_a_published_configuration_is_read_and_written(name):
    config = read(name)
    of_text = CONFIGURATIONS[name].get("text_config", CONFIGURATIONS[name])
    assert config.num_layers == of_text["num_hidden_layers"]
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written) == config


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_model_needs_that_there_is_not_is_named(name):
    with pytest.raises(InputError, match=REFUSED[name]):
        read(name)


def test_layers_with_a_window_keep_their_rope_however_short_the_context_is():
    for name in ("google/gemma-3-1b-it", "allenai/Olmo-3-7B-Instruct"):
        usual, short = read(name), read(name, max_position_embeddings=256)
        assert short.mechanisms == usual.mechanisms
        assert "window" in short.mechanisms.layer_kinds
    short = read("mistralai/Mistral-7B-v0.1", max_position_embeddings=256)
    assert short.mechanisms == PLAIN


def test_the_head_is_tied_as_the_family_has_it_where_no_part_of_the_file_says_so():
    name = "google/gemma-3-4b-it"
    assert read(name).tie_embeddings
    assert read(name, tie_word_embeddings=None).tie_embeddings
    assert not read(name, tie_word_embeddings=False).tie_embeddings
    assert not read("mistralai/Mistral-Small-3.1-24B-Instruct-2503").tie_embeddings


@pytest.mark.parametrize(
    "changes", [{"use_bidirectional_attention": True}, {"hidden_activation": "gelu"}]
)
def test_what_gemma_3_does_not_do_is_refused(changes):
    (key,) = changes
    with pytest.raises(InputError, match=f"{key} = .* is not supported"):
        read("google/gemma-3-270m", **changes)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("zai-org/GLM-4.5", "norm_topk_prob", True),
        ("LGAI-EXAONE/K-EXAONE-236B-A23B", "routed_scaling_factor", 2.5),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "rope_theta", 1e6),
        ("MiniMaxAI/MiniMax-M2", "rope_theta", 5e6),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "rope_theta", 1e6),
    ],
)
def test_a_key_that_is_missing_has_the_value_that_transformers_gives_it(name, key, value):
    without = {k: v for k, v in CONFIGURATIONS[name].items() if k != key}
    assert ModelConfig.from_hf(without) == read(name, **{key: value})


def test_queries_grow_with_positions_in_the_text_part_of_ministral_3():
    text = {"model_type": "ministral3", "num_attention_heads": 32, "num_key_value_heads": 8}
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
    rope |= {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e6}
    name = "mistralai/Mistral-Small-3.1-24B-Instruct-2503"
    scaling = read(name, text_config=TEXT | text | {"rope_parameters": rope}).rope_scaling
    assert scaling is not None
    assert (scaling.query_growth, scaling.attention_factor) == (0.1, 1.0)
    rope |= {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    with pytest.raises(InputError, match=r"llama_4_scaling_beta = 0.1 .*: queries grow beside Ya"):
        read(name, text_config=TEXT | text | {"rope_parameters": rope})


def test_a_dense_family_takes_at_most_sixty_lines_of_one_file_and_one_with_experts_eighty():
    folder = Path(families.__path__[0])
    for path in folder.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if count := text.count("= Family("):
            most = 80 if "Experts(" in text else 60
            assert len(text.splitlines()) <= most * count, path.name


BILLIONS = {
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36.2,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345,
    "HuggingFaceTB/SmolLM3-3B": 3.08,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54,
    "Qwen/Qwen2.5-14B-Instruct": 14.8,
    "Qwen/Qwen2.5-32B-Instruct": 32.8,
    "Qwen/Qwen2.5-3B-Instruct": 3.09,
    "Qwen/Qwen2.5-7B-Instruct": 7.62,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-14B": 14.8,
    "Qwen/Qwen3-235B-A22B": 235.1,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30.5,
    "THUDM/GLM-4-9B-0414": 9.40,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.10,
    "allenai/OLMo-2-1124-7B-Instruct": 7.30,
    "ibm-granite/granite-3.3-2b-instruct": 2.53,
    "ibm-granite/granite-3.3-8b-instruct": 8.17,
    "meta-llama/Llama-2-7b-chat-hf": 6.74,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.2-1B-Instruct": 1.24,
    "meta-llama/Llama-3.2-3B-Instruct": 3.21,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "microsoft/Phi-3.5-mini-instruct": 3.82,
    "microsoft/Phi-4-mini-instruct": 3.84,
    "microsoft/phi-4": 14.7,
    "mistralai/Ministral-8B-Instruct-2410": 8.02,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.25,
    "mistralai/Mistral-Nemo-Instruct-2407": 12.2,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23.6,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 140.6,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.7,
    "nvidia/Nemotron-Mini-4B-Instruct": 4.19,
    "MiniMaxAI/MiniMax-M2": 229,
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": 14.3,
    "Qwen/Qwen2-57B-A14B-Instruct": 57.4,
    "allenai/OLMoE-1B-7B-0924-Instruct": 6.92,
    "ibm-granite/granite-3.1-3b-a800m-instruct": 3.30,
    "openai/gpt-oss-120b": 116.8,
    "openai/gpt-oss-20b": 20.9,
    "rednote-hilab/dots.llm1.inst": 142,
    "baidu/ERNIE-4.5-0.3B-PT": 0.36,
    "baidu/ERNIE-4.5-21B-A3B-PT": 21.8,
    "CohereLabs/c4ai-command-r-v01": 35.0,
    "CohereLabs/c4ai-command-r7b-12-2024": 8.03,
    "LGAI-EXAONE/EXAONE-4.0-32B": 32.0,
    "arcee-ai/AFM-4.5B": 4.62,
    "zai-org/GLM-4.5": 355,
    "zai-org/GLM-4.5-Air": 106,
    "01-ai/Yi-1.5-9B-Chat": 8.83,
    "CohereLabs/c4ai-command-r-plus": 104,
    "IQuestLab/IQuest-Coder-V1-40B-Instruct": 39.8,
    "LGAI-EXAONE/K-EXAONE-236B-A23B": 236,
    "Qwen/Qwen2.5-Math-7B-Instruct": 7.62,
    "bigcode/starcoder2-7b": 7.17,
    "facebook/cwm": 32.6,
    "ibm-granite/granite-4.0-micro": 3.40,
    "inceptionai/Jais-2-8B-Chat": 8.09,
    "internlm/internlm3-8b-instruct": 8.80,
    "google/gemma-2-2b": 2.61,
    "google/gemma-3-1b-it": 1.00,
    "google/gemma-3-270m": 0.268,
    "google/gemma-3-4b-it": 3.88,
    "kyutai/helium-1-2b": 2.02,
    "naver-hyperclovax/HyperCLOVAX-SEED-Think-14B": 14.74,
    "mistralai/Ministral-3-8B-Instruct-2512": 8.49,
    "stabilityai/stablelm-2-12b-chat": 12.1,
    "stabilityai/stablelm-2-1_6b-chat": 1.64,
    "swiss-ai/Apertus-8B-Instruct-2509": 8.05,
    "tencent/Hunyuan-1.8B-Instruct": 1.79,
    "tencent/Hunyuan-A13B-Instruct": 80.4,
    "tencent/Hy3-preview": 295,
    "tiiuae/Falcon3-7B-Instruct": 7.46,
    "upstage/Solar-Open-100B": 102.6,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_a_model_has_as_many_parameters_as_it_is_known_for(name):
    c = read(name)
    attention = 2 * (c.num_heads + c.num_kv_heads) * c.head_dim
    experts, channels = c.mechanisms.experts, c.intermediate_size * c.num_layers
    if experts is not None:
        dense = len(experts.dense_layers)
        of_layer = experts.count * experts.intermediate + experts.shared
        channels = of_layer * (c.num_layers - dense) + c.intermediate_size * dense
    layers = c.hidden_size * (attention * c.num_layers + (2 + c.mechanisms.gated) * channels)
    outside = (2 - c.tie_embeddings) * c.vocab_size * c.hidden_size
    assert (layers + outside) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_no_family_is_also_said_to_be_missing():
    assert not FAMILIES.keys() & set(" ".join(MISSING.values()).split())


@pytest.mark.parametrize(
    ("name", "mechanisms"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", {}),
        ("mistralai/Ministral-8B-Instruct-2410", {}),  # its window is its context
        ("microsoft/Phi-4-mini-instruct", {"rotary_dim": 96}),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", {}),
        (
            "ibm-granite/granite-3.3-8b-instruct",
            {
                "multipliers": Multipliers(
                    embedding=12.0, residual=0.22, scores=0.0078125, logits=0.0625
                )
            },
        ),
        ("allenai/OLMo-2-1124-7B-Instruct", {"joint_qk_norm": True, "norm_placement": "post"}),
        ("THUDM/GLM-4-9B-0414", {"rotary_dim": 64, "norm_placement": "both"}),
        (
            "nvidia/Nemotron-Mini-4B-Instruct",
            {"rotary_dim": 64, "layer_norm": True, "activation": "relu2", "gated": False},
        ),
        (
            "Qwen/Qwen3-Coder-30B-A3B-Instruct",
            {"experts": Experts(count=128, chosen=8, intermediate=768)},
        ),
        (
            "mistralai/Mixtral-8x7B-Instruct-v0.1",
            {"experts": Experts(count=8, chosen=2, intermediate=14336)},
        ),
        (
            "openai/gpt-oss-120b",
            {
                "output_bias": True,
                "activation": "quick_gelu",
                "gate_limit": 7.0,
                "layer_kinds": ("window", "full") * 18,
                "window": 128,
                "sinks": True,
                "experts": Experts(
                    count=128, chosen=4, intermediate=2880, router_bias=True, biases=True
                ),
            },
        ),
        (
            "zai-org/GLM-4.5",
            {
                "rotary_dim": 64,
                "experts": Experts(
                    count=160,
                    chosen=8,
                    intermediate=1536,
                    scoring="sigmoid",
                    scale=2.5,
                    correction=True,
                    shared=1536,
                    dense_layers=(0, 1, 2),
                ),
            },
        ),
        (
            "CohereLabs/c4ai-command-r-plus",
            {
                "head_qk_norm": True,
                "parallel": True,
                "layer_norm": True,
                "norm_bias": False,
                "multipliers": Multipliers(logits=0.8333333333333334),
            },
        ),
        ("internlm/internlm3-8b-instruct", {}),
        ("kyutai/helium-1-2b", {}),
        ("tiiuae/Falcon3-7B-Instruct", {}),
        ("tencent/Hunyuan-1.8B-Instruct", {"late_qk_norm": True}),
        (
            "tencent/Hunyuan-A13B-Instruct",
            {
                "late_qk_norm": True,
                "experts": Experts(count=64, chosen=8, intermediate=3072, shared=3072),
            },
        ),
        ("swiss-ai/Apertus-8B-Instruct-2509", {"activation": "xielu", "gated": False}),
        (
            "stabilityai/stablelm-2-12b-chat",
            {"rotary_dim": 40, "head_qk_norm": True, "layer_norm": True, "parallel": True},
        ),
        (
            "bigcode/starcoder2-7b",
            {
                "output_bias": True,
                "mlp_bias": True,
                "layer_norm": True,
                "activation": "gelu_pytorch_tanh",
                "gated": False,
                "layer_kinds": ("window",) * 32,
                "window": 4096,
            },
        ),
        (
            "ibm-granite/granite-4.0-micro",
            {
                "multipliers": Multipliers(
                    embedding=12.0, residual=0.22, scores=0.015625, logits=0.1
                )
            },
        ),
        (
            "facebook/cwm",
            {"layer_kinds": ("full", "window", "window", "window") * 16, "window": 8192},
        ),
        (
            "LGAI-EXAONE/K-EXAONE-236B-A23B",
            {
                "layer_kinds": ("window", "window", "window", "nope") * 12,
                "window": 128,
                "experts": Experts(
                    count=128,
                    chosen=8,
                    intermediate=2048,
                    scoring="sigmoid",
                    scale=2.5,
                    correction=True,
                    shared=2048,
                    dense_layers=(0,),
                ),
            },
        ),
        ("baidu/ERNIE-4.5-0.3B-PT", {}),
        ("arcee-ai/AFM-4.5B", {"activation": "relu2", "gated": False}),
        (
            "LGAI-EXAONE/EXAONE-4.0-32B",
            {
                "norm_placement": "post",
                "layer_kinds": ("window", "window", "window", "nope") * 16,
                "window": 4096,
            },
        ),
        ("Qwen/Qwen2.5-VL-7B-Instruct", {}),
        ("Qwen/Qwen3-VL-8B-Instruct", {}),
        (
            "Qwen/Qwen3-VL-30B-A3B-Instruct",
            {"experts": Experts(count=128, chosen=8, intermediate=768)},
        ),
        (
            "baidu/ERNIE-4.5-21B-A3B-PT",
            {
                "experts": Experts(
                    count=64,
                    chosen=6,
                    intermediate=1536,
                    correction=True,
                    shared=3072,
                    dense_layers=(0,),
                ),
            },
        ),
        (
            "CohereLabs/c4ai-command-r-v01",
            {
                "parallel": True,
                "layer_norm": True,
                "norm_bias": False,
                "multipliers": Multipliers(logits=0.0625),
            },
        ),
        (
            "CohereLabs/c4ai-command-r7b-12-2024",
            {
                "parallel": True,
                "layer_norm": True,
                "norm_bias": False,
                "layer_kinds": ("window", "window", "window", "nope") * 8,
                "window": 4096,
                "multipliers": Multipliers(logits=0.25),
            },
        ),
        (
            "MiniMaxAI/MiniMax-M2",
            {
                "rotary_dim": 64,
                "joint_qk_norm": True,
                "experts": Experts(
                    count=256, chosen=8, intermediate=1536, scoring="sigmoid", correction=True
                ),
            },
        ),
    ],
)
def test_mechanisms_of_a_published_model(name, mechanisms):
    assert read(name).mechanisms == Mechanisms(**mechanisms)


def test_the_base_of_rope_is_stretched_by_alpha():
    assert read("tencent/Hunyuan-A13B-Instruct").rope_theta == pytest.approx(11158839.9, rel=1e-8)
    assert read("internlm/internlm3-8b-instruct").rope_theta == 5e7


def test_granite_4_without_rope_has_none_in_any_layer():
    config = read("ibm-granite/granite-4.0-micro", position_embedding_type="nope")
    assert config.mechanisms.layer_kinds == ("nope",) * 40
    assert read("ibm-granite/granite-4.0-micro").intermediate_size == 8192


def test_every_fourth_layer_of_smollm3_has_no_rope():
    kinds = read("HuggingFaceTB/SmolLM3-3B").mechanisms.layer_kinds
    assert kinds == ("full", "full", "full", "nope") * 9
    assert read("HuggingFaceTB/SmolLM3-3B", no_rope_layers=None).mechanisms.layer_kinds == kinds


def test_command_r_has_the_context_that_it_was_trained_on():
    assert read("CohereLabs/c4ai-command-r-v01").max_context == 131072


def test_layers_of_cohere2_whose_window_is_the_context_are_still_the_rotated_ones():
    config = read("CohereLabs/c4ai-command-r7b-12-2024", max_position_embeddings=4096)
    assert config.mechanisms.layer_kinds == ("full", "full", "full", "nope") * 8
    assert config.mechanisms.window is None


@pytest.mark.parametrize("changes", [{"layer_types": None}, {"sliding_window_pattern": 4}])
def test_layers_of_exaone_with_a_window_are_found_by_their_period(changes):
    name = "LGAI-EXAONE/EXAONE-4.0-32B"
    assert read(name, **{"layer_types": None} | changes).mechanisms == read(name).mechanisms
    plain = read(name, layer_types=None, sliding_window=None)
    assert plain.mechanisms == Mechanisms(norm_placement="post")


def test_layers_of_ernie_without_experts_are_those_of_the_configuration():
    name = "baidu/ERNIE-4.5-21B-A3B-PT"
    changes = {"moe_layer_start_index": 3, "moe_layer_end_index": 20, "moe_layer_interval": 2}
    experts = read(name, **changes).mechanisms.experts
    assert experts is not None
    assert [i for i in range(28) if i not in experts.dense_layers] == [*range(3, 20, 2)]
    everywhere = read(name, moe_layer_start_index=0).mechanisms.experts
    assert everywhere is not None
    assert everywhere.dense_layers == ()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("baidu/ERNIE-4.5-21B-A3B-PT", {"use_bias": True}, "use_bias = True is not supported"),
        ("baidu/ERNIE-4.5-21B-A3B-PT", {"moe_norm_min": 0.1}, "moe_norm_min = 0.1 is not"),
        ("CohereLabs/c4ai-command-r7b-12-2024", {"use_qk_norm": True}, "use_qk_norm = True is not"),
        ("swiss-ai/Apertus-8B-Instruct-2509", {"hidden_act": "silu"}, "hidden_act = 'silu' is not"),
        ("bigcode/starcoder2-7b", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("tencent/Hunyuan-A13B-Instruct", {"use_cla": True}, "use_cla = True is not supported"),
        (
            "tencent/Hunyuan-A13B-Instruct",
            {"num_shared_expert": [2] * 32},
            "num_shared_expert = .* is not supported: it is 1 in every layer",
        ),
        ("tencent/Hunyuan-A13B-Instruct", {"moe_topk": [8, 7]}, r"moe_topk = \[8, 7\] must be"),
        ("ibm-granite/granite-4.0-micro", {"num_local_experts": 8}, "num_local_experts = 8 is not"),
        (
            "ibm-granite/granite-4.0-micro",
            {"position_embedding_type": "alibi"},
            "position_embedding_type = 'alibi' is not supported",
        ),
        ("CohereLabs/c4ai-command-r7b-12-2024", {"rotary_pct": 0.5}, "rotary_pct = 0.5 is not"),
        (
            "CohereLabs/c4ai-command-r7b-12-2024",
            {"layer_types": ["full_attention"]},
            r"layer_types = \['full_attention'\] is not supported: there are 32 layers",
        ),
    ],
)
def test_what_these_lines_of_models_do_not_have_is_refused(name, changes, message):
    with pytest.raises(InputError, match=message):
        read(name, **changes)


def test_biases_of_llama_are_read():
    config = read("meta-llama/Llama-3.1-8B-Instruct", attention_bias=True, mlp_bias=True)
    assert config.qkv_bias
    assert config.mechanisms == Mechanisms(output_bias=True, mlp_bias=True)


def test_a_decoder_of_some_layers_keeps_what_these_do():
    config = read("HuggingFaceTB/SmolLM3-3B").of_layers([2, 3, 35])
    assert (config.num_layers, config.mechanisms.layer_kinds) == (3, ("full", "nope", "nope"))
    plain = read("Qwen/Qwen3-0.6B")
    assert plain.of_layers([0, 1]) == dataclasses.replace(plain, num_layers=2)


def test_layers_without_experts_are_those_of_the_configuration():
    name = "Qwen/Qwen3-30B-A3B"
    sparse = read(name, mlp_only_layers=[0, 3], decoder_sparse_step=2).mechanisms.experts
    assert sparse is not None
    assert sparse.dense_layers == (0, 2, 3, *range(4, 48, 2))
    assert read(name, mlp_only_layers=[*range(48)]).mechanisms == PLAIN
    some = read(name, mlp_only_layers=[0, 3]).of_layers([0, 1, 3, 7]).mechanisms.experts
    assert some is not None
    assert some.dense_layers == (0, 2)
    assert read(name, mlp_only_layers=[0, 3]).of_layers([3]).mechanisms == PLAIN


def test_longrope_has_the_context_that_it_is_opened_for():
    config = read("microsoft/Phi-4-mini-instruct")
    assert config.max_context == 4096
    longer = config.for_context(20_000)
    assert longer.max_context == 131_072
    assert longer.to_hf() == config.to_hf()
    assert [config.for_context(length) for length in (None, 4096)] == [config, config]


def test_configurations_of_the_first_families_are_written_as_before():
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen3-8B"):
        config = read(name)
        assert config.mechanisms == PLAIN
        assert set(config.to_hf()) == {
            *("architectures", "model_type", "hidden_act", "vocab_size", "hidden_size"),
            *("intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
            *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
            *("rope_scaling", "tie_word_embeddings"),
        }


def test_rope_of_layers_with_a_window_is_read_in_both_spellings():
    spelled = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    older = CONFIGURATIONS["google/gemma-3-1b-it"]
    rope = ("rope_theta", "rope_local_base_freq", "rope_scaling")
    newer = {key: value for key, value in older.items() if key not in rope}
    config = ModelConfig.from_hf(newer | {"rope_parameters": spelled})
    assert config == ModelConfig.from_hf(older)
    assert (config.rope_theta, config.mechanisms.window_rope_theta) == (1e6, 1e4)
    scaled = spelled | {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(InputError, match="rope_type = 'linear' is not supported: layers have"):
        ModelConfig.from_hf(newer | {"rope_parameters": scaled})


def test_windows_are_those_of_the_layers_that_have_them():
    kinds = read("google/gemma-2-2b-it").mechanisms.layer_kinds
    assert kinds == ("window", "full") * 13
    assert read("google/gemma-3-1b-it").mechanisms.layer_kinds[:7] == (
        *5 * ("window",),
        "full",
        "window",
    )
    assert set(read("mistralai/Mistral-7B-v0.1").mechanisms.layer_kinds) == {"window"}
    qwen = read(
        "Qwen/Qwen2.5-7B-Instruct",
        use_sliding_window=True,
        max_window_layers=26,
        sliding_window=4096,
    )
    assert qwen.mechanisms.layer_kinds == ("full",) * 26 + ("window",) * 2


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistralai/Mistral-Nemo-Instruct-2407", {"attention_bias": True}, "attention_bias = True"),
        ("microsoft/phi-4", {"partial_rotary_factor": 1.5}, "it rotates 192 of 128"),
        ("microsoft/phi-4", {"layer_types": ["full_attention"]}, "there are 40 layers"),
        ("microsoft/phi-4", {"layer_types": ["chunked"] * 40}, "layer_types = 'chunked'"),
        ("Qwen/Qwen3-8B", {"layer_types": ["sliding_attention"]}, "'sliding_attention' is not"),
        ("HuggingFaceTB/SmolLM3-3B", {"no_rope_layers": [1]}, "there are 36 layers"),
        ("ibm-granite/granite-3.3-2b-instruct", {"logits_scaling": 0}, "logits_scaling = 0 must"),
        ("Qwen/Qwen3-8B", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("nvidia/Nemotron-Mini-4B-Instruct", {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        (
            "microsoft/phi-4",
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0] * 64}},
            "have 1 and 64 numbers; heads rotate 64 pairs",
        ),
        (
            "Qwen/Qwen3-8B",
            {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}},
            "beta_slow = 2.0 must not be above beta_fast, 1.0",
        ),
        ("zai-org/GLM-4.5", {"n_group": 8}, "n_group = 8 is not supported: experts are not chosen"),
        ("openai/gpt-oss-20b", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0 is not supported: gates"),
        ("MiniMaxAI/MiniMax-M2", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not"),
        ("MiniMaxAI/MiniMax-M2", {"attn_type_list": [1, 0]}, "attn_type_list = 0 is not supported"),
        ("MiniMaxAI/MiniMax-M2", {"rotary_dim": 129}, "it rotates 129 of 128 dimensions"),
        ("allenai/OLMoE-1B-7B-0924-Instruct", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("Qwen/Qwen3-30B-A3B", {"use_qk_norm": False}, "use_qk_norm = False is not supported"),
        ("Qwen/Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "a token has 129 of 128 experts"),
        ("Qwen/Qwen3-8B", {"rope_scaling": {"type": "dynamic", "alpha": -1}}, "alpha = -1 must be"),
        ("Qwen/Qwen3-8B", {"ssd_jax_decoder": {"qkv_bias": True}}, "'qk_norm' is missing"),
        (
            "Qwen/Qwen3-8B",
            {"ssd_jax_decoder": {"qkv_bias": True, "qk_norm": True, "drains": 1}},
            "unexpected keyword argument 'drains'",
        ),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(name, changes, message):
    with pytest.raises(InputError, match=message):
        read(name, **changes)
