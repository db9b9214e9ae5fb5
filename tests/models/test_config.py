"""Reading configurations: what is supported is read right, what is not is named."""

import numpy as np
import pytest

from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.rope import inverse_frequencies
from ssd_jax.models.rope_scaling import RopeScaling

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
UNNAMED = {key: value for key, value in LLAMA["rope_scaling"].items() if key != "rope_type"}
SCALING = RopeScaling(kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)


def llama3(**changes):
    return {"rope_scaling": LLAMA["rope_scaling"] | changes}


def test_llama_3_2_is_read_with_its_rope_scaling():
    config = ModelConfig.from_hf(LLAMA)
    assert config.rope_scaling == SCALING
    assert (config.head_dim, config.num_kv_heads, config.tie_embeddings) == (64, 8, True)


def test_both_spellings_of_the_rope_settings_mean_the_same():
    newer = {key: LLAMA[key] for key in LLAMA if key not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = LLAMA["rope_scaling"] | {"rope_theta": LLAMA["rope_theta"]}
    assert ModelConfig.from_hf(newer) == ModelConfig.from_hf(LLAMA)


@pytest.mark.parametrize("scaling", [LLAMA["rope_scaling"], {"type": "linear", "factor": 2.0}])
def test_both_spellings_of_the_rope_settings_may_be_there_and_agree(scaling):
    newer = {"rope_type": scaling.get("type"), **scaling, "rope_theta": LLAMA["rope_theta"]}
    config = ModelConfig.from_hf({**LLAMA, "rope_scaling": scaling, "rope_parameters": newer})
    assert config == ModelConfig.from_hf({**LLAMA, "rope_scaling": scaling})


def test_an_output_head_is_its_own_where_the_file_does_not_say():
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    assert not ModelConfig.from_hf(config).tie_embeddings


def test_rotations_of_whole_heads_may_be_said():
    partial = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}
    config = {**LLAMA, "rope_scaling": None, "rope_parameters": partial, "partial_rotary_factor": 1}
    read = ModelConfig.from_hf(config)
    assert (read.rope_theta, read.rope_scaling) == (1e6, None)


def test_key_value_heads_default_to_query_heads():
    config = ModelConfig.from_hf({**LLAMA, "num_key_value_heads": None})
    assert config.num_kv_heads == 32


def test_families_differ_in_bias_and_norm():
    qwen2 = ModelConfig.from_hf({**LLAMA, "model_type": "qwen2"})
    qwen3 = ModelConfig.from_hf({**LLAMA, "model_type": "qwen3", "head_dim": 128})
    assert (qwen2.qkv_bias, qwen2.qk_norm) == (True, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


@pytest.mark.parametrize("older", [{"type": "linear"}, {"rope_type": None, "type": "linear"}])
def test_rope_scaling_is_read_by_its_older_name(older):
    named = ModelConfig.from_hf({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert named.rope_scaling is not None
    assert ModelConfig.from_hf({**LLAMA, "rope_scaling": {**older, "factor": 2.0}}) == named


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, r"'bert' is not supported; supported: llama, qwen2, qwen3"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4}}, "RoPE scaling 'ntk' is not"),
        ({"rope_scaling": {"rope_type": "linear"}}, "required key 'factor'"),
        ({"rope_scaling": {"factor": 8.0}}, "'factor' stands beside rope_type None.*linear, ll"),
        ({"rope_scaling": {"rope_type": "default", "factor": 8}}, "'factor' .* 'default'"),
        ({"rope_scaling": UNNAMED | {"factor": None}}, "'low_freq_factor' .* None"),
        ({"rope_scaling": UNNAMED}, "'factor' .* None"),
        ({"rope_parameters": {"rope_type": "default"}}, "are different scalings"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 32}}, "are different scalings"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 32}}, "are different scalings"),
        (llama3(original_max_position_embeddings=None), "embeddings = None must be a positive"),
        (llama3(original_max_position_embeddings=0.5), "embeddings = 0.5 must be a positive int"),
        (llama3(low_freq_factor=4.0), "low_freq_factor = 4.0 must be below high_freq_factor, 4.0"),
        (
            {"rope_parameters": LLAMA["rope_scaling"] | {"rope_theta": 1.0}},
            "different values of rope_theta",
        ),
        (
            {"original_max_position_embeddings": 64},
            "original_max_position_embeddings = 64, and 8192 in the RoPE settings",
        ),
        ({"is_causal": False}, "is_causal = False is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not"),
        (llama3(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5 is not"),
        ({"num_key_value_heads": 5}, "32 query heads do not divide into 5"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh'"),
        ({"num_attention_heads": None}, "num_attention_heads = None must be a positive integer"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings = 'x'"),
        ({"rope_theta": "big"}, "rope_theta = .big. must be a positive, finite number"),
        ({"rope_scaling": 3}, "wrong type"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "for 'full_attention' lay"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' must be true or false"),
        ({"mlp_bias": True, "model_type": "qwen3"}, "mlp_bias = True"),
        ({"attention_bias": "yes"}, "attention_bias = 'yes' must be true or false"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
    ],
)
def test_unsupported_keys_of_a_configuration_are_named(change, message):
    with pytest.raises(InputError, match=message):
        ModelConfig.from_hf({**LLAMA, **change})


def test_a_missing_key_is_named_with_the_file():
    config = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    with pytest.raises(InputError, match=r"some/config.json: required key 'hidden_size'"):
        ModelConfig.from_hf(config, source="some/config.json")


@pytest.mark.parametrize("key", sorted(UNNAMED))
def test_llama3_scaling_has_no_defaults(key):
    scaling = {name: value for name, value in LLAMA["rope_scaling"].items() if name != key}
    with pytest.raises(InputError, match=f"required key '{key}'"):
        ModelConfig.from_hf({**LLAMA, "rope_scaling": scaling})


def test_llama3_scaling_keeps_short_and_divides_long_wavelengths():
    plain = inverse_frequencies(ModelConfig.from_hf({**LLAMA, "rope_scaling": None}))
    scaled = inverse_frequencies(ModelConfig.from_hf(LLAMA))
    wavelengths = 2 * np.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert short.any()
    assert long.any()
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-6)
    np.testing.assert_allclose(scaled[long], plain[long] / 32, rtol=1e-6)
    between = ~short & ~long
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 32).all()
