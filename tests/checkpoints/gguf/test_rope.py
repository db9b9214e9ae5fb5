from __future__ import annotations

import math

import numpy as np
import pytest

from ssd_jax.checkpoints.gguf.source import GGUFFile
from ssd_jax.errors import InputError
from ssd_jax.models import rope
from ssd_jax.models.rope_scaling import RopeScaling
from tests.checkpoints import tiny_gguf
from tests.checkpoints import tiny_models as tiny


def converter_divisors(size, base, factor, low, high, context) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors, in float32."""
    divisors = []
    for i in range(0, size, 2):
        frequency = np.float32(1.0 / base ** (i / size))
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


LLAMA_3_1 = converter_divisors(tiny.HEAD_DIM, 10000.0, 8.0, 1.0, 4.0, 8192)


def write(path, family="llama", *, divisors=None, **changes):
    raw = {} if divisors is None else {"rope_freqs.weight": (divisors, "F32")}
    keys = tiny_gguf.metadata(family, **changes)
    return tiny_gguf.write(path, family, tiny.hf_tensors(family), keys=keys, raw=raw)


@pytest.mark.parametrize(
    ("factor", "low", "high", "context"),
    [
        (8.0, 1.0, 4.0, 8192),  # Llama 3.1
        (32.0, 1.0, 4.0, 8192),  # Llama 3.2
        (16.0, 2.0, 8.0, 4096),
        (2.5, 1.0, 3.0, 2048),
        (8.0, 0.5, 4.0, 131072),
        (8.0, 1.0, 1.2, 8192),  # no frequency is interpolated, so that many ranges fit
        (8.0, 1.0, 2.0, 4096),  # one is
        (2.0, 0.1, 8.0, 65536),  # none is divided by the whole factor
    ],
)
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_llama3_scaling_gives_the_frequencies_that_llama_cpp_runs(
    tmp_path, factor, low, high, context, base
):
    divisors = converter_divisors(tiny.HEAD_DIM, base, factor, low, high, context)
    file = GGUFFile(write(tmp_path / "m.gguf", divisors=divisors, rope__freq_base=base))
    plain = base ** -(np.arange(0, tiny.HEAD_DIM, 2) / tiny.HEAD_DIM)
    assert file.config.rope_scaling is not None
    np.testing.assert_allclose(rope.inverse_frequencies(file.config), plain / divisors, rtol=2e-5)
    assert "rope_freqs.weight" not in file.shapes


def test_published_parameters_come_back_as_published(tmp_path):
    divisors = converter_divisors(tiny.HEAD_DIM, 500000.0, 32.0, 1.0, 4.0, 8192)
    file = GGUFFile(write(tmp_path / "m.gguf", divisors=divisors, rope__freq_base=500000.0))
    assert file.config.rope_scaling == RopeScaling(
        kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )


def test_divisors_of_another_scheme_are_refused(tmp_path):
    divisors = np.linspace(1, 40, tiny.HEAD_DIM // 2, dtype=np.float32) ** 1.5
    with pytest.raises(InputError, match=r"rope_freqs.weight.*no Llama 3.1 RoPE scaling"):
        GGUFFile(write(tmp_path / "m.gguf", divisors=divisors))


def test_divisors_of_which_one_is_off_are_refused(tmp_path):
    divisors = LLAMA_3_1.copy()
    divisors[0] *= 1.005
    with pytest.raises(InputError, match=r"no Llama 3.1 RoPE scaling"):
        GGUFFile(write(tmp_path / "m.gguf", divisors=divisors))


@pytest.mark.parametrize("kind", ["linear", "yarn", None])
def test_divisors_beside_another_scaling_are_refused(tmp_path, kind):
    scaling = {"rope__scaling__type": kind, "rope__scaling__factor": 4.0}
    path = write(tmp_path / "m.gguf", divisors=LLAMA_3_1, **scaling)
    with pytest.raises(InputError, match=f"'{kind or 'linear'}' beside the divisors of rope_freqs"):
        GGUFFile(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope__scaling__type": "none", "rope__scaling__factor": 4.0},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 1.0},
        {"rope__scaling__attn_factor": 1.0, "attention__causal": True},
    ],
)
def test_divisors_beside_no_scaling_are_read(tmp_path, changes):
    config = GGUFFile(write(tmp_path / "m.gguf", divisors=LLAMA_3_1, **changes)).config
    assert config.rope_scaling == RopeScaling(kind="llama3", factor=8.0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("divisors", [LLAMA_3_1, np.ones_like(LLAMA_3_1)])
def test_divisors_are_llamas_alone(tmp_path, family, divisors):
    with pytest.raises(InputError, match=r"no place for tensor 'rope_freqs.weight'"):
        GGUFFile(write(tmp_path / "m.gguf", family, divisors=divisors))


def test_a_file_without_a_base_has_llama_cpps(tmp_path):
    assert GGUFFile(write(tmp_path / "m.gguf", rope__freq_base=None)).config.rope_theta == 10000.0


def test_divisors_of_one_change_nothing(tmp_path):
    divisors = np.ones(tiny.HEAD_DIM // 2, np.float32)
    assert GGUFFile(write(tmp_path / "m.gguf", divisors=divisors)).config.rope_scaling is None


def test_yarn_is_read_with_the_factor_of_attention_that_llama_cpp_computes(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    keys = {f"rope__scaling__{name}": value for name, value in scaling.items()}
    config = GGUFFile(write(tmp_path / "m.gguf", "qwen2", **keys)).config
    assert config.rope_scaling == RopeScaling(
        kind="yarn", factor=4.0, original_context=64, attention_factor=0.1 * math.log(4) + 1
    )
    assert config.max_context == 256


@pytest.mark.parametrize(
    "changes",
    [
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        {"rope__scaling__factor": 4.0},
        {"rope__scale_linear": 4.0},
    ],
)
def test_linear_scaling_in_every_spelling(tmp_path, changes):
    config = GGUFFile(write(tmp_path / "m.gguf", **changes)).config
    assert config.rope_scaling == RopeScaling(kind="linear", factor=4.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope__scaling__type": "none"},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 1.0},
        {"rope__scaling__type": "linear"},
    ],
)
def test_no_scaling_in_every_spelling(tmp_path, changes):
    assert GGUFFile(write(tmp_path / "m.gguf", **changes)).config.rope_scaling is None
